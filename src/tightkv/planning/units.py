"""Sizes, rates and lengths as people write them."""

from __future__ import annotations

import re

from tightkv.errors import ConfigError

__all__ = ["format_bytes", "parse_length", "parse_rate", "parse_size"]

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NUMBER = r"(\d+(?:\.\d+)?)"


def parse_size(text: str) -> int:
    """Bytes of `96GiB` (2^30) or `96GB` (10^9); a number alone could be either.

    Raises:
        ConfigError: names what is wrong.
    """
    match = re.fullmatch(_NUMBER + r"\s*([KMGT])(I?)B?", text.strip().upper())
    if match is None:
        raise ConfigError(
            f"{text!r} is no size: give a number with GiB (2^30 bytes) or GB (10^9 bytes), as "
            "96GiB."
        )
    units = _BINARY if match[3] else _DECIMAL
    return int(float(match[1]) * units[match[2]])


def parse_rate(text: str, unit: str) -> float:
    """`3.35TB/s` with the unit "B/s", or `989TFLOPS` with the unit "FLOPS".

    Raises:
        ConfigError: names what is wrong.
    """
    match = re.fullmatch(_NUMBER + rf"\s*([KMGT]?){re.escape(unit.upper())}", text.strip().upper())
    if match is None:
        raise ConfigError(f"{text!r} is no rate: give a number with G{unit} or T{unit}.")
    return float(match[1]) * _DECIMAL[match[2]]


def parse_length(text: str) -> int:
    """Tokens of `16384` or `16k` (16 times 1,024), `1m` (1,048,576).

    Raises:
        ConfigError: names what is wrong.
    """
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if match is None or int(match[1]) < 1:
        raise ConfigError(
            f"{text!r} is no length: give tokens, as 16384, or 16k for 16 times 1,024."
        )
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]]


def format_bytes(num_bytes: float) -> str:
    """In GiB, or in MiB below a tenth of one."""
    if abs(num_bytes) >= 2**30 / 10:
        return f"{num_bytes / 2**30:,.2f} GiB"
    return f"{num_bytes / 2**20:,.2f} MiB"
