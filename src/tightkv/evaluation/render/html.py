"""A report as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tightkv.evaluation.render import plots
from tightkv.evaluation.render.numbers import ratio
from tightkv.evaluation.render.statistics import statistics_blocks
from tightkv.evaluation.render.tables import (
    PASSES,
    Table,
    bucket_tables,
    cache_table,
    facts,
    fidelity_table,
    generation_table,
    layer_group_table,
    layer_table,
    limits,
    noise_floor,
    overview_table,
    retrieval_grid,
    retrieval_table,
    task_table,
)
from tightkv.evaluation.report import AnswerExample, EvaluationReport

__all__ = ["html"]

# So much of what is equal stands before the first difference.
_SHOWN_PREFIX = 400
_NUM_EXAMPLES = 3


def html(report: EvaluationReport) -> str:
    """The page; sections of which nothing was measured are left out."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files("tightkv.evaluation.render").joinpath("report.html").read_text("utf-8")
    return environment.from_string(source).render(
        report=report,
        headline=_headline(report),
        limits=limits(report),
        noise_floor=noise_floor(report),
        overview=overview_table(report),
        legend=[(name, Markup(sign)) for name, sign in plots.legend(report.arms)],
        sections=[section for section in _sections(report) if section.plots or section.tables],
        answers=list(_answers(report)),
        generation=generation_table(report),
        details=list(_details(report)),
        caches=cache_table(report),
        facts=facts(report),
    )


@dataclass(frozen=True, slots=True)
class _Section:
    """Plots, and tables below them.

    Attributes:
        has_legend: whether the plots tell arms by their markers.
    """

    name: str
    title: str
    text: str
    plots: list[tuple[str, Markup]]
    tables: list[Table]
    has_legend: bool = True


@dataclass(frozen=True, slots=True)
class _Answer:
    """Two answers, cut where they part.

    Attributes:
        is_cut: whether more of what is equal stands before `common`.
        base, answer: the word that differs, and what follows it.
    """

    prompt: str
    facts: str
    is_cut: bool
    common: str
    base: tuple[str, str]
    answer: tuple[str, str]


def _headline(report: EvaluationReport) -> str:
    levels = [arm.verdict.level for arm in report.arms]
    counts = [f"{levels.count(level)} {level}" for level in ("safe", "caution", "unsafe")]
    return ", ".join(count for count in counts if not count.startswith("0 "))


def _sections(report: EvaluationReport) -> Iterator[_Section]:
    yield _Section(
        "position",
        "By context length",
        "A cache that is good for short prompts can fail on long ones: each token reads all that "
        "was stored before it. Bars are one standard error, the dashed line is the limit.",
        list(_bucket_plots(report)),
        [],
    )
    yield _Section(
        "memory",
        "Memory against loss",
        "The line joins those that no other beats in both; left and down is better.",
        _drawn([("Bytes per token against mean KLD", plots.pareto_plot(report))]),
        [],
        has_legend=False,
    )
    group = layer_group_table(report)
    yield _Section(
        "layers",
        "By layer",
        "Each layer by itself, given what the baseline gives it: clipped values as a share of "
        "those written, and the squared error of attention's output as a share of its square.",
        _drawn(
            (f"{title[0].upper()}{title[1:]}", plots.layer_plot(report, what, title))
            for what, title in (
                ("attention_error", "error of attention's output"),
                ("k_clip_rate", "K clipped"),
                ("v_clip_rate", "V clipped"),
            )
        ),
        [group] if group else [],
    )
    tasks = task_table(report)
    yield _Section(
        "tasks",
        "Tasks",
        "The same items with both caches, compared in pairs. An interval that contains 0 shows no "
        "difference; the dashed line is the limit.",
        _drawn([("Points lost, with 95 % intervals", plots.task_plot(report))]),
        [tasks] if tasks else [],
    )
    retrieval = retrieval_table(report)
    yield _Section(
        "retrieval",
        "Retrieval",
        "A sentence with a word to remember is hidden in a long text; the text is as long as the "
        "columns say, and the sentence stands at the depth that the rows say. 100 is best.",
        _drawn(_heat_maps(report)),
        [retrieval] if retrieval else [],
        has_legend=False,
    )


def _bucket_plots(report: EvaluationReport) -> Iterator[tuple[str, Markup]]:
    for of_top, what in ((False, "Mean KLD"), (True, "Same top p")):
        for name in PASSES:
            buckets = [
                bucket
                for arm in report.arms
                if name in arm.fidelity
                for bucket in arm.fidelity[name].buckets
            ]
            if len({bucket.begin for bucket in buckets}) > 1:
                yield f"{what}, {name}", Markup(plots.bucket_plot(report, name, of_top=of_top))


def _heat_maps(report: EvaluationReport) -> Iterator[tuple[str, str]]:
    grids = [(report.baseline, report.baseline_retrieval)]
    grids += [(arm.name, arm.retrieval.cells) for arm in report.arms if arm.retrieval]
    for index, (name, cells) in enumerate(grids):
        if cells:
            yield name, plots.heat_map(f"retrieval-{index}", name, cells)


def _drawn(of: Any) -> list[tuple[str, Markup]]:
    return [(title, Markup(svg)) for title, svg in of if svg]


def _answers(report: EvaluationReport) -> Iterator[tuple[str, list[_Answer]]]:
    for arm in report.arms:
        examples = [
            _cut(example, of.temperature)
            for of in arm.generation
            for example in of.examples[:_NUM_EXAMPLES]
        ]
        if examples:
            yield arm.name, examples


def _cut(example: AnswerExample, temperature: float) -> _Answer:
    common = example.base[: _word_start(example.base, example.answer)]
    return _Answer(
        prompt=example.prompt,
        facts=(
            f"equal up to token {example.first_divergence}, ROUGE-L {ratio(example.rouge_l, 3)}, "
            f"temperature {temperature:g}"
        ),
        is_cut=len(common) > _SHOWN_PREFIX,
        common=common[-_SHOWN_PREFIX:],
        base=_first_word(example.base[len(common) :]),
        answer=_first_word(example.answer[len(common) :]),
    )


def _word_start(base: str, answer: str) -> int:
    """Where the first word begins that is not in both, or their common end."""
    same = zip(base, answer, strict=False)
    end = next((i for i, (one, other) in enumerate(same) if one != other), None)
    if end is None:
        end = min(len(base), len(answer))
    parts_in_word = any(_is_of_word(text[end : end + 1]) for text in (base, answer))
    while parts_in_word and end and _is_of_word(base[end - 1]):
        end -= 1
    return end


def _is_of_word(text: str) -> bool:
    """Whether spaces stand around such words, unlike Chinese ones."""
    return text.isascii() and text.isalnum()


def _first_word(text: str) -> tuple[str, str]:
    """The word that begins it, with the space before it; without spaces, one character."""
    end = len(text) - len(text.lstrip())
    if end < len(text) and not text[end].isascii():
        return text[: end + 1], text[end + 1 :]
    while end < len(text) and text[end].isascii() and not text[end].isspace():
        end += 1
    return text[:end], text[end:]


def _details(report: EvaluationReport) -> Iterator[tuple[str, list[Table]]]:
    """Tables of all figures, each with a title."""
    fidelity = fidelity_table(report)
    if fidelity:
        yield "Fidelity", [fidelity, *bucket_tables(report)]
    for arm in report.arms:
        tables = [
            Table(f"{title}, {name}", ("", ""), tuple((k.strip(), v.strip()) for k, v in rows))
            for name in PASSES
            if name in arm.fidelity
            for title, rows in statistics_blocks(arm.fidelity[name].overall)
        ]
        layers = layer_table(arm)
        if layers:
            tables.append(layers)
        if arm.retrieval and arm.retrieval.cells:
            tables.append(retrieval_grid("Hidden words found", arm.retrieval.cells))
        if tables:
            yield arm.name, tables
