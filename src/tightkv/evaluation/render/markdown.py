"""A report for a pull request, in GitHub's Markdown."""

from __future__ import annotations

import re

from tightkv.evaluation.render.numbers import percent, ratio
from tightkv.evaluation.render.tables import (
    Table,
    bucket_tables,
    cache_table,
    facts,
    fidelity_table,
    generation_table,
    layer_group_table,
    limits,
    noise_floor,
    overview_table,
    retrieval_grid,
    retrieval_table,
    task_table,
)
from tightkv.evaluation.report import AnswerExample, ArmReport, EvaluationReport, LayerFigures

__all__ = ["markdown"]

_NUM_EXAMPLES = 2
_NUM_LAYERS = 3
_LONGEST_TEXT = 1200

_SIGNS = {"safe": "✅ safe", "caution": "⚠️ caution", "unsafe": "❌ unsafe"}


def markdown(report: EvaluationReport) -> str:
    """The report; sections of which nothing was measured are left out."""
    sections = [
        _verdicts(report),
        *_fidelity(report),
        *_layers(report),
        *_generation(report),
        *_section("Tasks", task_table(report)),
        *_retrieval(report),
        _facts(report),
    ]
    return "\n\n".join(sections) + "\n"


def _verdicts(report: EvaluationReport) -> str:
    overview = overview_table(report)
    lines = [
        f"# KV cache of {_inline(report.model)}",
        _table(overview),
        _inline(limits(report)),
        _inline(noise_floor(report)),
    ]
    for arm in report.arms:
        reasons = "\n".join(f"- {_inline(reason)}" for reason in arm.verdict.reasons)
        lines.append(f"**{_code(arm.name)}: {_SIGNS[arm.verdict.level]}**\n\n{reasons}")
    return "\n\n".join(lines)


def _fidelity(report: EvaluationReport) -> list[str]:
    table = fidelity_table(report)
    parts = _section("Fidelity", table)
    for of_buckets in bucket_tables(report):
        parts += [f"### {of_buckets.title}", _table(of_buckets)]
    group = layer_group_table(report)
    if group:
        parts += [f"### {group.title}", _table(group)]
    return parts


def _layers(report: EvaluationReport) -> list[str]:
    rows = tuple(
        (
            arm.name,
            str(layer.layer_idx),
            percent(layer.k_clip_rate, 3),
            percent(layer.v_clip_rate, 3),
            percent(layer.attention_error, 3),
        )
        for arm in report.arms
        for layer in _worst_layers(arm)
    )
    if not rows:
        return []
    columns = ("KV cache", "layer", "K clipped", "V clipped", "attention error")
    return _section("Layers with the greatest error", Table("", columns, rows))


def _worst_layers(arm: ArmReport) -> list[LayerFigures]:
    return sorted(arm.layers, key=lambda layer: -layer.attention_error)[:_NUM_LAYERS]


def _generation(report: EvaluationReport) -> list[str]:
    parts = _section("Generation", generation_table(report))
    for arm in report.arms:
        examples = [
            (of.temperature, example)
            for of in arm.generation
            for example in of.examples[:_NUM_EXAMPLES]
        ][:_NUM_EXAMPLES]
        if examples:
            texts = "\n\n".join(_example(*example) for example in examples)
            summary = f"<summary>Worst answers of {_html(arm.name)}</summary>"
            parts.append(f"<details>{summary}\n\n{texts}\n\n</details>")
    return parts


def _example(temperature: float, example: AnswerExample) -> str:
    return "\n\n".join(
        [
            f"Equal up to token {example.first_divergence}, ROUGE-L {ratio(example.rouge_l, 3)}, "
            f"temperature {temperature:g}. Prompt, the baseline's answer, this cache's:",
            *map(_fenced, (example.prompt, example.base, example.answer)),
        ]
    )


def _retrieval(report: EvaluationReport) -> list[str]:
    parts = _section("Retrieval", retrieval_table(report))
    if not parts:
        return []
    grids = [(report.baseline, report.baseline_retrieval)]
    grids += [(arm.name, arm.retrieval.cells) for arm in report.arms if arm.retrieval]
    for name, cells in grids:
        if cells:
            parts += [f"Found, {_code(name)}:", _table(retrieval_grid("", cells))]
    return parts


def _facts(report: EvaluationReport) -> str:
    rows = tuple(facts(report))
    table = _table(Table("", ("", ""), rows, frozenset({0, 1})))
    return f"## Model, data and options\n\n{_table(cache_table(report))}\n\n{table}"


def _section(title: str, table: Table | None) -> list[str]:
    return [f"## {title}", _table(table)] if table else []


def _table(table: Table) -> str:
    rules = ("---" if column in table.text_columns else "---:" for column in _indices(table))
    rows = [list(map(_cell, table.columns)), list(rules)]
    for row in table.rows:
        cells = [_SIGNS.get(cell, _cell(cell)) for cell in row]
        if table.columns[0] == "KV cache":
            cells[0] = _code(row[0])
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _indices(table: Table) -> range:
    return range(len(table.columns))


def _cell(text: str) -> str:
    return _inline(" ".join(text.split()))


def _inline(text: str) -> str:
    """No character of it means anything to Markdown, and no name calls anybody."""
    text = re.sub(r"([\\`*_\[\]#|~])", r"\\\1", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("@", "@\u200b")


def _code(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _fenced(text: str) -> str:
    """A block of code, whose fence is longer than any run of backticks in it."""
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]} …"
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
