from __future__ import annotations

import re

import pytest

from tightkv.errors import ConfigError
from tightkv.planning import available_memory, find_hardware, installed_memory, known_hardware

NAMES = ["h100-80g", "h200", "a100-80g", "a100-40g", "l4", "l40s", "rtx4090", "v100", "b200"]
NAMES += ["mi300x"]


def test_the_catalog_has_what_was_promised_with_sources() -> None:
    assert list(known_hardware()) == NAMES
    for key, hardware in known_hardware().items():
        assert hardware.sources, key
        assert hardware.bandwidth is not None
        assert hardware.flops is not None
        # A slip of a unit would fall out of these.
        assert 20 * 2**30 < hardware.memory_bytes < 200 * 2**30
        assert 2e11 < hardware.bandwidth < 1e13
        assert 1e14 < hardware.flops < 3e15


# GB of the name, and GB/s of the data sheet.
SHEETS = {
    "h100-80g": (80, 3350),
    "h200": (141, 4800),
    "a100-80g": (80, 2039),
    "a100-40g": (40, 1555),
    "l4": (24, 300),
    "l40s": (48, 864),
    "rtx4090": (24, 1008),
    "v100": (32, 900),
    "b200": (180, 8000),
    "mi300x": (192, 5300),
}


@pytest.mark.parametrize("key", NAMES)
def test_figures_are_those_of_the_data_sheet_it_names(key: str) -> None:
    hardware = known_hardware()[key]
    size, bandwidth = SHEETS[key]
    assert hardware.bandwidth == bandwidth * 1e9
    assert f"{size}GB" in hardware.name
    # What is reported lies around the GB of the name, which are neither 10^9 nor 2^30 bytes.
    assert 0.93 * size * 2**30 < hardware.memory_bytes <= 1.075 * size * 10**9
    sheet, memory = hardware.sources
    assert re.search("data sheet|whitepaper", sheet)
    assert memory.startswith("memory as ")


@pytest.mark.parametrize("key", NAMES)
def test_native_fp8(key: str) -> None:
    """Hopper, Ada, Blackwell and CDNA 3 have it; Ampere and Volta do not."""
    assert known_hardware()[key].native_fp8 == (key not in ("a100-80g", "a100-40g", "v100"))


def test_custom() -> None:
    hardware = find_hardware("custom:96GiB,bandwidth=3.35TB/s,flops=989TFLOPS,fp8=yes,int8=no")
    assert hardware.memory_bytes == 96 * 2**30
    assert (hardware.bandwidth, hardware.flops) == (3.35e12, 989e12)
    assert (hardware.native_fp8, hardware.native_int8) == (True, False)
    plain = find_hardware("custom:24GB")
    assert (plain.memory_bytes, plain.bandwidth, plain.native_fp8) == (24 * 10**9, None, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a100", "choose one of h100-80g"),
        ("custom:96", "GiB"),
        ("custom:96GiB,speed=1", "Unknown property 'speed'"),
        ("custom:96GiB,fp8=maybe", "yes or no"),
        ("custom:96GiB,bandwidth=3", "no rate"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_hardware(text)


def test_this_machine() -> None:
    installed, free = installed_memory(), available_memory()
    assert installed is not None
    assert free is not None
    assert 0 < free <= installed
    assert find_hardware("cpu").memory_bytes == installed
