"""What issue 9 asks of an H200, and whether it was reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LONG = 16384
"""Tokens from which on a decode is long enough for the bars."""


@dataclass(frozen=True)
class Bar:
    """One demand.

    Attributes:
        name: what is measured.
        value: the worst of all points; None if none was measured.
        bar: what it must reach.
        at_most: whether it must stay below instead.
    """

    name: str
    value: float | None
    bar: float
    at_most: bool = False

    def as_json(self) -> dict[str, object]:
        met = None
        if self.value is not None:
            met = self.value <= self.bar if self.at_most else self.value >= self.bar
        return asdict(self) | {"met": met}


def bars(report: Mapping[str, Any]) -> list[dict[str, object]]:
    """Of a report's "decode", "folding" and "serving"; what was not measured is neither."""
    long = [point for point in report["decode"] if point["context"] >= LONG]
    shares = (("float16", 0.75), ("int8 static", 0.65), ("int8 per token", 0.65))
    found = [
        Bar(f"decode of {LONG} tokens and more, {name}: share of the copy", _share(long, name), bar)
        for name, bar in (*shares, ("fp8_e4m3 static", 0.65))
    ]
    found += [
        Bar(f"decode of {LONG} tokens and more, {name}: times float16", _speedup(long, name), 1.7)
        for name in ("int8 static", "int8 per token")
    ]
    costs = [point["cost"] for point in report["folding"]]
    found.append(Bar("cost of factors per channel", max(costs, default=None), 0.02, at_most=True))
    arms = {arm["kv_cache_dtype"]: arm for arm in report["serving"]}
    for name, key, bar in (
        ("requests held at one budget, int8: times float16", "requests_held", 1.93),
        ("tokens per second at one budget, int8: times float16", "tokens_per_s", 1.7),
    ):
        value = None
        if {"float16", "int8"} <= arms.keys():
            value = arms["int8"][key] / arms["float16"][key]
        found.append(Bar(name, value, bar))
    return [bar.as_json() for bar in found]


def _share(points: Iterable[Mapping[str, Any]], name: str) -> float | None:
    return min((p["share_of_copy"] for p in points if p["format"] == name), default=None)


def _speedup(points: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The least, over shapes that both were timed with."""
    times = {(p["format"], p["heads"], p["batch"], p["context"]): p["us"] for p in points}
    return min(
        (
            times[("float16", *shape)] / taken
            for (timed, *shape), taken in times.items()
            if timed == name and ("float16", *shape) in times
        ),
        default=None,
    )
