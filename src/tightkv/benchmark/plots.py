"""Reports as pictures: a PNG file, or an HTML page that holds all it shows."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from tightkv.benchmark.kv import KVReport
from tightkv.benchmark.latency import LatencyReport
from tightkv.benchmark.serve import ServeReport
from tightkv.benchmark.tables import TextTable
from tightkv.benchmark.throughput import ThroughputReport
from tightkv.errors import ConfigError
from tightkv.files import atomic_file, check_target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "check_plot",
    "plot_kv",
    "plot_latency",
    "plot_serve",
    "plot_throughput",
    "write_plot",
]

_PNG, _HTML = ".png", ".html"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { border: 1px solid #bbb; padding: .25rem .6rem }
td + td { text-align: right } svg { max-width: 100%; height: auto }
"""


def check_plot(path: Path) -> None:
    """Notice before the work what would fail after it.

    Raises:
        ConfigError: for a file of another kind.
        OutputError: if it cannot be written.
    """
    if path.suffix not in (_PNG, _HTML):
        raise ConfigError(f"--plot is {str(path)!r}: name a file that ends with {_PNG} or {_HTML}.")
    check_target(path)


def write_plot(path: Path, figure: Figure, table: TextTable) -> None:
    """Write the picture, in HTML with the table below it."""
    picture = io.BytesIO()
    if path.suffix == _PNG:
        figure.savefig(picture, format="png", dpi=150)
        content = picture.getvalue()
    else:
        figure.savefig(picture, format="svg")
        content = _page(picture.getvalue().decode(), table).encode()
    with atomic_file(path) as file:
        file.write(content)


def plot_kv(report: KVReport) -> Figure:
    """Tokens held, speed, and the time of a decode step by context."""
    with_lines = [row for row in report.rows if row.result.itl is not None]
    figure, axes = _figure(3 if with_lines else 2)
    names = [row.name for row in report.rows]
    _bars(axes[0], names, [row.result.pool_tokens for row in report.rows], "tokens that fit")
    speeds = [row.result.figures["output_throughput"] for row in report.rows]
    _bars(axes[1], names, speeds, "output tokens/s")
    for row in with_lines:
        line = row.result.itl
        assert line is not None
        (drawn,) = axes[2].plot(line.contexts, _milliseconds(line.seconds), "o", label=row.name)
        ends = numpy.asarray([0, line.contexts[-1]])
        axes[2].plot(ends, 1e3 * (line.intercept + line.slope * ends), color=drawn.get_color())
    if with_lines:
        _label(axes[2], "tokens of context", "ms", "decode step of one request")
        axes[2].legend()
    return figure


def plot_latency(report: LatencyReport) -> Figure:
    """Speed of prefill and decode by depth, a line per cache precision and batch."""
    figure, axes = _figure(2)
    groups: dict[str, list[Any]] = {}
    for row in report.rows:
        name = f"{row.kv_cache_dtype}, batch {row.batch_size}, {row.input_len}+{row.output_len}"
        groups.setdefault(name, []).append(row)
    for name, rows in groups.items():
        depths = [row.depth for row in rows]
        for axis, phase in zip(axes, ("prefill", "decode"), strict=True):
            rates = [getattr(row, phase) for row in rows]
            if None not in rates:
                means, stds = [rate.mean for rate in rates], [rate.std for rate in rates]
                axis.errorbar(depths, means, stds, fmt="o-", capsize=3, label=name)
    for axis, title in zip(axes, ("prefill", "decode"), strict=True):
        _label(axis, "tokens before the prompt", "tokens/s", title)
        axis.set_ylim(bottom=0)
    axes[0].legend()
    return figure


def plot_throughput(report: ThroughputReport) -> Figure:
    """Tokens held and speed."""
    figure, axes = _figure(2)
    names = [row.kv_cache_dtype for row in report.rows]
    _bars(axes[0], names, [row.pool_tokens for row in report.rows], "tokens that fit")
    rates = [row.output_tokens_per_second for row in report.rows]
    _bars(axes[1], names, [rate.mean for rate in rates], "output tokens/s")
    axes[1].errorbar(names, [r.mean for r in rates], [r.std for r in rates], fmt="none", capsize=4)
    return figure


def plot_serve(report: ServeReport) -> Figure:
    """Shares of requests by TTFT and TPOT, and tokens per second over time."""
    figure, axes = _figure(3)
    for number, run in enumerate(report.runs, start=1):
        done = [each for each in run.figures.timings if each.is_complete]
        name = f"load {number}"
        _shares(axes[0], [each.ttft for each in done], name)
        _shares(axes[1], [each.tpot for each in done if each.tpot is not None], name)
        begin = min(each.start for each in done)
        times = [time - begin for each in done for time in each.token_times]
        counts = numpy.bincount(numpy.asarray(times, dtype=numpy.int64))
        axes[2].plot(counts, "o-", label=name)
        axes[2].set_ylim(bottom=0)
    _label(axes[0], "ms", "share of requests", "time to first token")
    _label(axes[1], "ms", "share of requests", "time per output token")
    _label(axes[2], "seconds", "tokens in this second", "output")
    if len(report.runs) > 1:
        axes[0].legend()
    return figure


def _figure(count: int) -> tuple[Figure, Sequence[Any]]:
    from matplotlib.figure import Figure  # half a second that other commands do not wait

    figure = Figure(figsize=(4.5 * count, 4), layout="constrained")
    return figure, [*numpy.atleast_1d(figure.subplots(1, count))]


def _bars(axis: Any, names: Sequence[str], values: Sequence[float], title: str) -> None:
    bars = axis.bar(names, values, color="tab:blue")
    axis.bar_label(bars, [f"{value:,.0f}" for value in values])
    axis.set_title(title)
    axis.margins(y=0.12)


def _label(axis: Any, x: str, y: str, title: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_title(title)


def _shares(axis: Any, seconds: Sequence[float], name: str) -> None:
    ordered = sorted(_milliseconds(seconds))
    shares = numpy.linspace(0, 1, len(ordered) + 1)
    axis.step([0.0, *ordered], shares, where="post", label=name)
    axis.set_xlim(left=0)


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    return [1e3 * each for each in seconds]


def _page(picture: str, table: TextTable) -> str:
    heading = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.headings)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n"
        for row in table.rows
    )
    notes = "".join(f"<p>{html.escape(note)}</p>\n" for note in table.notes)
    title = html.escape(table.title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n<h1>{title}</h1>\n{picture[picture.index('<svg') :]}\n"
        f"<table><tr>{heading}</tr>\n{rows}</table>\n{notes}</html>\n"
    )
