"""Reports as tables of text: for a terminal, Markdown, CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightkv.benchmark.data import TRACES
from tightkv.benchmark.kv import KVReport, KVRow
from tightkv.benchmark.latency import LatencyReport
from tightkv.benchmark.serve import ServeReport, ServeRun
from tightkv.benchmark.statistics import Figures
from tightkv.benchmark.sweep import MeanStd
from tightkv.benchmark.throughput import ThroughputReport
from tightkv.planning import format_bytes

__all__ = [
    "TextTable",
    "as_csv",
    "as_markdown",
    "console_block",
    "kv_table",
    "latency_table",
    "serve_table",
    "throughput_table",
]

_MIB = 2**20
_WIDTH = 50
_HEADINGS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells, the first column being names.

    Attributes:
        notes: sentences below it.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def as_markdown(table: TextTable) -> str:
    """The table in Markdown, with its title above it."""
    rules = ["---", *("---:" for _ in table.headings[1:])]
    lines = [f"| {' | '.join(cells)} |" for cells in (table.headings, rules, *table.rows)]
    notes = [f"\n{note}" for note in table.notes]
    return "\n".join([f"**{table.title}**", "", *lines, *notes])


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of a report's JSON; names within names are joined by underscores, lists left out."""
    flat = [_flat(row) for row in rows]
    names = [*dict.fromkeys(name for row in flat for name in row)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().rstrip("\n")


def latency_table(report: LatencyReport) -> TextTable:
    """A row per combination, with llama-bench's names of tests."""
    rows = []
    for row in report.rows:
        depth = f" @ d{row.depth}" if row.depth else ""
        decode = "-" if row.decode is None else str(row.decode)
        rows.append(
            (
                row.kv_cache_dtype,
                f"pp{row.input_len}+tg{row.output_len}{depth}",
                str(row.batch_size),
                str(row.prefill),
                decode,
                f"{row.latency.mean:.3f} ± {row.latency.std:.3f}",
            )
        )
    headings = ("KV cache", "test", "batch", "prefill t/s", "decode t/s", "latency s")
    return TextTable(f"{_short(report.model)}, {_threads(report.threads)}", headings, tuple(rows))


def throughput_table(report: ThroughputReport) -> TextTable:
    """A row per cache precision."""
    rows = tuple(
        (
            row.kv_cache_dtype,
            f"{row.pool_tokens:,}",
            f"{row.peak_running}",
            f"{row.preemptions}",
            str(row.requests_per_second),
            str(row.tokens_per_second),
            str(row.output_tokens_per_second),
        )
        for row in report.rows
    )
    first = report.rows[0]
    title = (
        f"{_short(report.model)}, {_threads(report.threads)}: {first.num_requests} requests "
        f"({report.dataset}), {first.num_prompt_tokens:,} + {first.num_output_tokens:,} tokens"
    )
    headings = ("KV cache", "pool tokens", "at once", "preemptions", "requests/s", "tokens/s")
    return TextTable(title, (*headings, "output tokens/s"), rows)


def serve_table(report: ServeReport) -> TextTable:
    """A row per load, means over its repetitions."""
    rows = []
    for begin in range(0, len(report.runs), report.repetitions):
        runs = report.runs[begin : begin + report.repetitions]
        rows.append(
            (
                _load_name(report, runs[0]),
                _over(runs, lambda figures: figures.request_throughput),
                _over(runs, lambda figures: figures.output_throughput),
                _over(runs, lambda figures: figures.metrics["ttft"].median),
                _over(runs, lambda figures: figures.metrics["tpot"].median),
                _over(runs, lambda figures: figures.metrics["itl"].median),
                str(sum(run.figures.failed for run in runs)),
            )
        )
    headings = ("load", "requests/s", "output tokens/s", "TTFT ms", "TPOT ms", "ITL ms", "failed")
    asked = f"{report.data.num_prompts} requests ({report.data.name})"
    title = f"{_short(report.target.model)}: {asked}, medians of times"
    return TextTable(title, headings, tuple(rows))


def console_block(
    run: ServeRun,
    *,
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    notes: Sequence[str] = (),
) -> str:
    """The lines that `vllm bench serve` shows of a run."""
    figures, load = run.figures, run.load
    pairs: list[tuple[str, str]] = [
        ("Successful requests:", str(figures.completed)),
        ("Failed requests:", str(figures.failed)),
    ]
    if load.max_concurrency is not None:
        pairs.append(("Maximum request concurrency:", str(load.max_concurrency)))
    if not math.isinf(load.request_rate):
        pairs.append(("Request rate configured (RPS):", f"{load.request_rate:.2f}"))
    pairs += [
        ("Benchmark duration (s):", f"{figures.duration:.2f}"),
        ("Total input tokens:", str(figures.total_input_tokens)),
        ("Total generated tokens:", str(figures.total_output_tokens)),
        ("Request throughput (req/s):", f"{figures.request_throughput:.2f}"),
    ]
    if figures.total_cached_tokens:
        pairs.insert(-2, ("Of them from the prefix cache:", str(figures.total_cached_tokens)))
    if figures.request_goodput is not None:
        pairs.append(("Request goodput (req/s):", f"{figures.request_goodput:.2f}"))
    pairs += [
        ("Output token throughput (tok/s):", f"{figures.output_throughput:.2f}"),
        ("Peak output token throughput (tok/s):", f"{figures.max_output_tokens_per_s:.2f}"),
        ("Peak concurrent requests:", f"{figures.max_concurrent_requests:.2f}"),
        ("Total token throughput (tok/s):", f"{figures.total_token_throughput:.2f}"),
    ]
    lines = [" Serving Benchmark Result ".center(_WIDTH, "="), *map(_line, pairs)]
    for name in metrics:
        lines += _metric_lines(figures, name)
    return "\n".join([*lines, "=" * _WIDTH, *notes])


def kv_table(report: KVReport) -> TextTable:
    """A column per cache precision; figures in brackets are over those of the first."""
    length = report.request_len
    rows = [
        _kv_line(report, "K", lambda row: row.result.k_format),
        _kv_line(report, "V", lambda row: row.result.v_format),
        _kv_line(report, "KV bytes per token", _bytes_per_token, "bytes_per_token"),
        _kv_line(report, "  planned", lambda row: f"{row.predicted.bytes_per_token:,.0f}"),
        _kv_line(report, "pool, tokens", lambda row: f"{row.result.pool_tokens:,}", "pool_tokens"),
        _kv_line(report, "  planned", lambda row: f"{row.predicted.pool_tokens:,}"),
        _kv_line(
            report,
            f"requests of {length:,} tokens that fit",
            lambda row: f"{row.result.max_requests:.2f}",
        ),
        _kv_line(report, "  planned", lambda row: f"{row.predicted.max_requests:.2f}"),
        _kv_line(report, "requests in a step, mean", lambda row: f"{row.result.mean_running:.2f}"),
        _kv_line(report, "preemptions", lambda row: f"{row.result.preemptions}"),
        _kv_line(
            report,
            "output tokens/s",
            lambda row: f"{row.result.figures['output_throughput']:.1f}",
            "output_throughput",
        ),
    ]
    rows += [
        _kv_times(report, "TTFT ms, mean", "mean_ttft_ms"),
        _kv_times(report, "TTFT ms, p99", "p99_ttft_ms"),
        _kv_times(report, "TPOT ms, mean", "mean_tpot_ms"),
    ]
    if all(row.result.itl for row in report.rows):
        rows += [
            _kv_line(report, "ITL of one request, ms", _itl),
            _kv_line(report, "faster beyond a context of", _break_even),
        ]
    rows.append(
        _kv_line(
            report,
            "peak memory, MiB",
            lambda row: f"{row.result.peak_bytes / _MIB:,.0f}",
            "peak_bytes",
        )
    )
    title = (
        f"{_short(report.model)}, {_threads(report.threads)}: {report.num_prompts} requests of "
        f"{report.input_len:,} + {report.output_len:,} tokens at once, "
        f"{format_bytes(report.pool_bytes)} of KV cache each"
    )
    headings = ("", *(row.name for row in report.rows))
    return TextTable(title, headings, tuple(rows), _kv_notes(report))


def _kv_line(
    report: KVReport, name: str, cell: Callable[[KVRow], str], ratio: str | None = None
) -> tuple[str, ...]:
    cells = []
    for row in report.rows:
        text = cell(row)
        if ratio is not None and row is not report.rows[0]:
            text += f" ({report.ratios(row)[ratio]:.3g} ×)"
        cells.append(text)
    return (name, *cells)


def _kv_times(report: KVReport, name: str, key: str) -> tuple[str, ...]:
    known = key if key in report.ratios(report.rows[-1]) else None
    return _kv_line(report, name, lambda row: f"{row.result.figures[key]:,.1f}", known)


def _bytes_per_token(row: KVRow) -> str:
    return f"{row.result.bytes_per_token:,.0f}"


def _itl(row: KVRow) -> str:
    line = row.result.itl
    assert line is not None
    return f"{1e3 * line.intercept:.2f} + {1e6 * line.slope:.2f} per 1,000 tokens"


def _break_even(row: KVRow) -> str:
    if row.break_even is None:
        return "-"
    return f"{row.break_even:,.0f} tokens" if row.break_even else "0: at every context"


def _kv_notes(report: KVReport) -> tuple[str, ...]:
    notes = []
    saturated = max(row.result.max_requests for row in report.rows)
    if report.num_prompts < saturated:
        notes.append(
            f"{report.num_prompts} requests do not fill the roomiest pool ({saturated:.1f} fit): "
            "ask for more with --num-prompts to see what it gains."
        )
    if not all(row.result.peak_is_since_load for row in report.rows):
        notes.append(
            "Peak memory counts the loading of the weights, too: this system keeps no other."
        )
    lines = [row.result.itl for row in report.rows if row.result.itl is not None]
    if any(min(line.slope, line.intercept) < 0 for line in lines):
        notes.append(
            "A decode step cannot take less than nothing, nor less with more context: the machine "
            "was busy with something else, so measure again."
        )
    return tuple(notes)


def _metric_lines(figures: Figures, name: str) -> list[str]:
    short, heading = _HEADINGS[name]
    summary = figures.metrics[name]
    pairs = [
        (f"Mean {short} (ms):", f"{summary.mean:.2f}"),
        (f"Median {short} (ms):", f"{summary.median:.2f}"),
        *(
            (f"P{percent:g} {short} (ms):", f"{value:.2f}")
            for percent, value in summary.percentiles.items()
        ),
    ]
    return [heading.center(_WIDTH, "-"), *map(_line, pairs)]


def _line(pair: tuple[str, str]) -> str:
    return f"{pair[0]:<40} {pair[1]:<10}".rstrip()


def _load_name(report: ServeReport, run: ServeRun) -> str:
    load = run.load
    rate = f"{load.request_rate:g} requests/s"
    if math.isinf(load.request_rate):
        has_times = load.self_timed and report.data.name in TRACES
        rate = f"the trace's times × {load.arrival_scale:g}" if has_times else "all at once"
    if load.max_concurrency is None:
        return rate
    return f"{rate}, at most {load.max_concurrency}"


def _over(runs: Sequence[ServeRun], figure: Callable[[Figures], float]) -> str:
    return str(MeanStd(tuple(figure(run.figures) for run in runs)))


def _short(model: str) -> str:
    return Path(model).name or model


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _flat(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            cells |= _flat(value, f"{before}{name}_")
        elif not isinstance(value, list | tuple):
            cells[f"{before}{name}"] = value
    return cells
