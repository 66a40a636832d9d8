"""A report in a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from tightkv.evaluation.render.numbers import percent, points, points_interval, ratio
from tightkv.evaluation.render.statistics import statistics_blocks
from tightkv.evaluation.render.tables import (
    PASSES,
    limits,
    mean_kld,
    noise_floor,
    p99_kld,
    ppl_change,
    same_top,
)
from tightkv.evaluation.report import ArmReport, EvaluationReport, Level
from tightkv.metrics import DivergenceFigures

__all__ = ["LEAST_WIDTH", "print_report"]

LEAST_WIDTH = 100
_COLORS: dict[Level, str] = {"safe": "green", "caution": "yellow", "unsafe": "bold red"}


def print_report(report: EvaluationReport, console: Console, *, details: bool = False) -> None:
    """Show what was found, the verdicts last.

    Args:
        report: of an evaluation.
        console: where to.
        details: also the blocks of `llama-perplexity --kl-divergence`, of each arm and pass.
    """
    width = min(console.width, LEAST_WIDTH)
    if details:
        _print_details(report, console)
    console.print(_overview(report), width=width)
    console.print()
    if any(arm.tasks for arm in report.arms):
        console.print(_tasks(report), width=width)
        console.print()
    console.print(escape(noise_floor(report)), style="dim", width=width, highlight=False)
    console.print(escape(limits(report)), style="dim", width=width, highlight=False)
    for arm in report.arms:
        console.print()
        level = arm.verdict.level
        line = Text.assemble((arm.name, "bold"), ": ", (level, _COLORS[level]))
        console.print(line, width=width)
        reasons = RichTable.grid(padding=(0, 1))
        reasons.add_column(width=1)
        reasons.add_column()
        for reason in arm.verdict.reasons:
            reasons.add_row(" ", Text(reason))
        console.print(reasons, width=width)


def _overview(report: EvaluationReport) -> RichTable:
    """Two lines per arm: what prefill gave, and decode."""
    has_answers = any(arm.generation for arm in report.arms)
    has_needles = any(arm.retrieval for arm in report.arms)
    title = Text(f"{report.model}, against {report.baseline}")
    table = RichTable(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("KV cache,\ntokens that fit", overflow="fold", min_width=15)
    table.add_column("bits/val\nB/token", justify="right", no_wrap=True)
    table.add_column("\npass", no_wrap=True)
    for name in ("\nmean KLD", "99 %\nKLD", "same\ntop p", "\nPPL"):
        table.add_column(name, justify="right", no_wrap=True)
    if has_answers:
        table.add_column("equal\nROUGE", justify="right", no_wrap=True)
    if has_needles:
        table.add_column("\nfound", justify="right", no_wrap=True)
    table.add_column("\nverdict", no_wrap=True)
    for arm in report.arms:
        cells = [f"{arm.cache.bits_per_value:.4g}\n{arm.cache.bytes_per_token:,.0f}"]
        cells += _fidelity(arm)
        if has_answers:
            cells.append(_answers(arm))
        if has_needles:
            cells.append(percent(arm.retrieval.found, 0) if arm.retrieval else "")
        level = arm.verdict.level
        first = Text.assemble(arm.name, (f"\n{arm.cache.tokens_ratio:.2f} ×", "dim"))
        table.add_row(first, *map(Text, cells), Text(level, _COLORS[level]))
    return table


def _fidelity(arm: ArmReport) -> list[str]:
    names = [name for name in PASSES if name in arm.fidelity]
    overall = [arm.fidelity[name].overall for name in names]

    def lines(cell: Callable[[DivergenceFigures], str]) -> str:
        return "\n".join(map(cell, overall))

    return ["\n".join(names), *map(lines, (_tight_kld, p99_kld, same_top, ppl_change))]


def _tight_kld(of: DivergenceFigures) -> str:
    return mean_kld(of).replace(" ", "")


def _answers(arm: ArmReport) -> str:
    if not arm.generation:
        return ""
    of = arm.generation[0]
    return f"{percent(of.exact_match, 0)}\n{ratio(of.rouge_l, 3)}"


def _tasks(report: EvaluationReport) -> RichTable:
    table = RichTable(box=None, padding=(0, 1, 0, 0))
    table.add_column("\ntask", overflow="fold", min_width=20)
    table.add_column("\nKV cache", overflow="fold", min_width=15)
    for name in ("\nn", "\nbaseline", "this\ncache"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("points lost\n(95 % interval)", justify="right", no_wrap=True)
    table.add_column("\np", justify="right", no_wrap=True)
    order = list(dict.fromkeys((of.task, of.metric) for arm in report.arms for of in arm.tasks))
    rows = [(of, arm.name) for arm in report.arms for of in arm.tasks]
    for of, name in sorted(rows, key=lambda row: order.index((row[0].task, row[0].metric))):
        table.add_row(
            Text(f"{of.task}, {of.metric}"),
            Text(name),
            f"{of.num_items:,}",
            ratio(of.score_base, 3),
            ratio(of.score, 3),
            f"{points(of.drop)} ({points_interval(of.drop_low, of.drop_high)})",
            f"{of.p_value:.2g}",
        )
    return table


def _print_details(report: EvaluationReport, console: Console) -> None:
    for arm in report.arms:
        for name in PASSES:
            if name not in arm.fidelity:
                continue
            heading = f"{arm.name}, {name}, {arm.fidelity[name].overall.num_tokens:,} tokens"
            console.print(Text(heading, "bold"))
            for title, rows in statistics_blocks(arm.fidelity[name].overall):
                console.print(f"====== {title} ======", highlight=False)
                for row, value in rows:
                    console.print(Text(f"{row}: {value}"))
                console.print()
