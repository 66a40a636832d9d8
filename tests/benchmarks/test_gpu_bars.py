"""The bars of the GPU benchmark: the worst point counts, and what was not measured is not met."""

from __future__ import annotations

import pytest
from benchmarks.gpu.bars import bars


def decode(name: str, context: int, us: float, share: float) -> dict[str, object]:
    point = {"format": name, "heads": (32, 8, 128), "batch": 1, "context": context}
    return point | {"us": us, "share_of_copy": share}


REPORT = {
    "decode": [
        decode("float16", 16384, 20.0, 0.8),
        decode("float16", 65536, 80.0, 0.76),
        decode("int8 static", 16384, 11.0, 0.7),
        decode("int8 static", 65536, 50.0, 0.64),
        decode("float16", 2048, 5.0, 0.1),
        decode("int8 static", 2048, 5.0, 0.1),
    ],
    "folding": [{"cost": 0.01}, {"cost": 0.03}],
    "serving": [
        {"kv_cache_dtype": "float16", "requests_held": 31, "tokens_per_s": 1000.0},
        {"kv_cache_dtype": "int8", "requests_held": 61, "tokens_per_s": 1650.0},
    ],
}


@pytest.mark.parametrize(
    ("word", "value", "met"),
    [
        ("float16: share", 0.76, True),
        ("int8 static: share", 0.64, False),
        ("int8 per token: share", None, None),
        ("fp8_e4m3 static: share", None, None),
        ("int8 static: times float16", 1.6, False),
        ("int8 per token: times float16", None, None),
        ("factors per channel", 0.03, False),
        ("requests held", 61 / 31, True),
        ("tokens per second", 1.65, False),
    ],
)
def test_the_worst_point_counts(word: str, value: float | None, met: bool | None) -> None:
    found = [bar for bar in bars(REPORT) if word in str(bar["name"])]
    assert [(bar["value"], bar["met"]) for bar in found] == [(value, met)]


def test_nothing_measured_is_nothing_met() -> None:
    empty = bars({"decode": [], "folding": [], "serving": []})
    assert len(empty) == 9
    assert all(bar["value"] is None and bar["met"] is None for bar in empty)
