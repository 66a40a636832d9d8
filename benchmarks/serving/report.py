"""Rows of the comparison: what was measured, against what, and whether a bar is met."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.serving.driver import Result
from benchmarks.serving.engines import Outcome

__all__ = ["Bar", "Row", "as_json", "at_least", "at_most", "compare", "table", "write_atomically"]


@dataclass(frozen=True)
class Bar:
    """A bound of a ratio."""

    limit: float
    is_lower: bool

    def __str__(self) -> str:
        return f"{'≥' if self.is_lower else '≤'} {self.limit:.2f}"

    def admits(self, ratio: float) -> bool:
        return ratio >= self.limit if self.is_lower else ratio <= self.limit


def at_least(limit: float) -> Bar:
    return Bar(limit, is_lower=True)


def at_most(limit: float) -> Bar:
    return Bar(limit, is_lower=False)


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        work: what was done.
        unit: of both figures.
        ours: our figure; None if we failed.
        peer_name: what ours is compared with.
        peer: its figure; None if it is absent or failed.
        bar: of ours / peer; None where no bar is set.
        remark: why a figure is missing.
    """

    work: str
    unit: str
    ours: float | None
    peer_name: str = ""
    peer: float | None = None
    bar: Bar | None = None
    remark: str = ""

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.ours is not None and self.peer else None

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is met; None where there is no bar, or no ratio."""
        if self.bar is None or self.ratio is None:
            return None
        return self.bar.admits(self.ratio)


def compare(
    work: str,
    unit: str,
    figure: Callable[[Result], float],
    ours: Outcome,
    peer: Outcome,
    bar: Bar | None = None,
) -> Row:
    """The row of two outcomes, medians of a figure."""
    remarks = [
        f"{outcome.arm.engine.name} {outcome.failure}"
        for outcome in (ours, peer)
        if outcome.failure
    ]
    return Row(
        work=work,
        unit=unit,
        ours=ours.median(figure),
        peer_name=peer.arm.name,
        peer=peer.median(figure),
        bar=bar,
        remark="; ".join(remarks),
    )


def table(rows: Sequence[Row], title: str) -> Table:
    result = Table(title=title)
    for heading in ("work", "ours", "peer", "its figure", "ratio", "bar", "met"):
        is_number = heading in ("ours", "its figure", "ratio", "bar")
        result.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows:
        result.add_row(
            row.work,
            _figure(row.ours, row.unit),
            _peer(row),
            _figure(row.peer, row.unit),
            "-" if row.ratio is None else f"{row.ratio:.3f}",
            "-" if row.bar is None else str(row.bar),
            {True: "yes", False: "NO", None: "-"}[row.is_met],
        )
    return result


def as_json(row: Row) -> dict[str, Any]:
    return {
        **asdict(row),
        "bar": None if row.bar is None else str(row.bar),
        "ratio": row.ratio,
        "met": row.is_met,
    }


def write_atomically(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _peer(row: Row) -> str:
    """Its name; with the reason where a figure is missing, which names it if its own is."""
    if row.remark and row.peer is not None:
        return f"{row.peer_name} ({row.remark})"
    return row.remark or row.peer_name or "-"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f} {unit}"
