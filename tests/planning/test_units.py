from __future__ import annotations

import pytest

from tightkv.errors import ConfigError
from tightkv.planning.units import format_bytes, parse_length, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "value"),
    [("96GiB", 96 * 2**30), ("96GB", 96 * 10**9), ("1.5 TiB", 3 * 2**39), ("512M", 512 * 10**6)],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(("text", "value"), [("16384", 16384), ("16k", 16384), ("1M", 2**20)])
def test_lengths(text: str, value: int) -> None:
    assert parse_length(text) == value


def test_rates() -> None:
    assert parse_rate("3.35TB/s", "B/s") == 3.35e12
    assert parse_rate("989TFLOPS", "FLOPS") == 989e12


def test_what_is_refused() -> None:
    for text in ("96", "GiB", "-1GiB", "96XB"):
        with pytest.raises(ConfigError, match="no size"):
            parse_size(text)
    for text in ("0", "16q", "1.5k", ""):
        with pytest.raises(ConfigError, match="no length"):
            parse_length(text)
    with pytest.raises(ConfigError, match="no rate"):
        parse_rate("3.35TB", "B/s")


def test_bytes_are_shown_in_units_of_1024() -> None:
    assert format_bytes(5 * 2**29) == "2.50 GiB"
    assert format_bytes(3 * 2**20) == "3.00 MiB"
