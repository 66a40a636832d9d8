"""What a report shows as tables; where they are shown gives them their form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tightkv.evaluation.render.numbers import (
    change,
    kld,
    limit_percent,
    percent,
    points,
    points_interval,
    positions,
    quantile,
    ratio,
    with_error,
)
from tightkv.evaluation.report import (
    ArmReport,
    EvaluationReport,
    FidelityPass,
    GenerationFigures,
    PassName,
    RetrievalCell,
)
from tightkv.metrics import DivergenceFigures

__all__ = [
    "PASSES",
    "Table",
    "bucket_tables",
    "cache_table",
    "facts",
    "fidelity_table",
    "generation_table",
    "layer_group_table",
    "layer_table",
    "limits",
    "noise_floor",
    "overview_table",
    "retrieval_grid",
    "retrieval_table",
    "task_table",
]

PASSES: tuple[PassName, ...] = ("prefill", "decode")

_NONE = "–"  # noqa: RUF001 (an en dash stands for what was not measured)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text.

    Attributes:
        text_columns: indices of columns of words; all others hold numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: frozenset[int] = frozenset({0})


Cell = Callable[[ArmReport], str]


def overview_table(report: EvaluationReport) -> Table:
    """One row per arm, and the baseline's; without columns of which nothing was measured."""
    cells = [(name, cell) for name, cell in _overview(report.arms)]
    base = report.baseline_cache
    base_cells = {
        "bits/value": f"{base.bits_per_value:.4g}",
        "bytes/token": f"{base.bytes_per_token:,.0f}",
        "tokens that fit": f"{base.tokens_ratio:.2f} ×",
    }
    first = (report.baseline, "baseline", *(base_cells.get(name, _NONE) for name, _ in cells))
    return Table(
        "Verdicts",
        ("KV cache", "verdict", *(name for name, _ in cells)),
        (
            first,
            *(
                (arm.name, arm.verdict.level, *(cell(arm) for _, cell in cells))
                for arm in report.arms
            ),
        ),
        frozenset({0, 1}),
    )


def _overview(arms: Sequence[ArmReport]) -> Iterable[tuple[str, Cell]]:
    yield "bits/value", lambda arm: f"{arm.cache.bits_per_value:.4g}"
    yield "bytes/token", lambda arm: f"{arm.cache.bytes_per_token:,.0f}"
    yield "tokens that fit", lambda arm: f"{arm.cache.tokens_ratio:.2f} ×"
    for name in PASSES:
        if any(name in arm.fidelity for arm in arms):
            yield f"mean KLD, {name}", _of_pass(name, mean_kld)
    for title, cell in (("99 % KLD", p99_kld), ("same top p", same_top), ("PPL", ppl_change)):
        if any(arm.fidelity for arm in arms):
            yield title, lambda arm, cell=cell: _worst(arm, cell)  # type: ignore[misc]
    if any(arm.generation for arm in arms):
        yield "equal answers", _of_generation(lambda of: percent(of.exact_match, 1))
        yield "ROUGE-L", _of_generation(lambda of: ratio(of.rouge_l, 3))
    for task, metric in _tasks(arms):
        yield f"{task}: points lost", _of_task(task, metric)
    if any(arm.retrieval for arm in arms):
        yield (
            "needles found",
            lambda arm: percent(arm.retrieval.found, 1) if arm.retrieval else _NONE,
        )


def mean_kld(of: DivergenceFigures) -> str:
    return with_error(of.kld.mean, of.kld.standard_error)


def p99_kld(of: DivergenceFigures) -> str:
    value = quantile(of.kld, 99)
    return _NONE if value is None else kld(value)


def same_top(of: DivergenceFigures) -> str:
    return percent(of.same_top_p)


def ppl_change(of: DivergenceFigures) -> str:
    return change(of.ppl_ratio)


def _of_pass(name: PassName, cell: Callable[[DivergenceFigures], str]) -> Cell:
    return lambda arm: cell(arm.fidelity[name].overall) if name in arm.fidelity else _NONE


def _worst(arm: ArmReport, cell: Callable[[DivergenceFigures], str]) -> str:
    """Of the pass with the greater mean KLD."""
    if not arm.fidelity:
        return _NONE
    return cell(max(arm.fidelity.values(), key=lambda read: read.overall.kld.mean).overall)


def _of_generation(cell: Callable[[GenerationFigures], str]) -> Cell:
    return lambda arm: cell(arm.generation[0]) if arm.generation else _NONE


def _of_task(task: str, metric: str) -> Cell:
    def cell(arm: ArmReport) -> str:
        for of in arm.tasks:
            if (of.task, of.metric) == (task, metric):
                return f"{points(of.drop)} ({points_interval(of.drop_low, of.drop_high)})"
        return _NONE

    return cell


def _tasks(arms: Sequence[ArmReport]) -> list[tuple[str, str]]:
    """Tasks in the order asked for, each with the first of its metrics."""
    metrics: dict[str, str] = {}
    for arm in arms:
        for of in arm.tasks:
            metrics.setdefault(of.task, of.metric)
    return list(metrics.items())


def fidelity_table(report: EvaluationReport) -> Table | None:
    """One row per arm and pass, and the noise floor."""
    columns: tuple[tuple[str, Callable[[DivergenceFigures], str]], ...] = (
        ("tokens", lambda of: f"{of.num_tokens:,}"),
        ("PPL", lambda of: f"{of.ppl:.3f}"),
        (
            "PPL ratio",
            lambda of: f"{ratio(of.ppl_ratio)} ± {ratio(of.ppl_ratio_standard_error)}",
        ),
        ("mean KLD", mean_kld),
        ("median", lambda of: _quantile_or_none(of, 50)),
        ("99 %", p99_kld),
        ("99.9 %", lambda of: _quantile_or_none(of, 99.9)),
        ("max", lambda of: kld(of.kld.maximum)),
        ("RMS Δp", lambda of: percent(of.rms_delta_p)),
        ("same top p", lambda of: f"{same_top(of)} ± {percent(of.same_top_p_standard_error)}"),
    )
    rows = [
        (arm.name, name, *(cell(arm.fidelity[name].overall) for _, cell in columns))
        for arm in report.arms
        for name in PASSES
        if name in arm.fidelity
    ]
    if not rows:
        return None
    floor = ("noise floor", "prefill", *(cell(report.noise_floor) for _, cell in columns))
    names = tuple(name for name, _ in columns)
    return Table("Fidelity", ("KV cache", "pass", *names), (floor, *rows), frozenset({0, 1}))


def _quantile_or_none(of: DivergenceFigures, percentage: float) -> str:
    value = quantile(of.kld, percentage)
    return _NONE if value is None else kld(value)


def bucket_tables(report: EvaluationReport) -> list[Table]:
    """Mean KLD and same top p by position, of each pass; none where there is one bucket only."""
    tables = []
    for name in PASSES:
        reads = [(arm.name, arm.fidelity[name]) for arm in report.arms if name in arm.fidelity]
        spans = sorted({(b.begin, b.end) for _, read in reads for b in read.buckets})
        if len(spans) < 2:
            continue
        columns = ("KV cache", *(positions(*span) for span in spans))
        for what, cell in (("Mean KLD", mean_kld), ("Same top p", same_top)):
            rows = tuple((arm, *_by_span(read, spans, cell)) for arm, read in reads)
            tables.append(Table(f"{what} by position, {name}", columns, rows))
    return tables


def _by_span(
    read: FidelityPass, spans: Sequence[tuple[int, int]], cell: Callable[[DivergenceFigures], str]
) -> list[str]:
    of = {(bucket.begin, bucket.end): bucket.figures for bucket in read.buckets}
    return [cell(of[span]) if span in of else _NONE for span in spans]


def layer_group_table(report: EvaluationReport) -> Table | None:
    """Mean KLD with an arm's formats in some layers only."""
    layers = list(dict.fromkeys(g.layers for arm in report.arms for g in arm.layer_groups))
    if not layers:
        return None
    rows = []
    for arm in report.arms:
        of = {group.layers: group.figures for group in arm.layer_groups}
        if of:
            rows.append((arm.name, *(mean_kld(of[g]) if g in of else _NONE for g in layers)))
    columns = ("KV cache", *(f"layers {group}" for group in layers))
    return Table("Mean KLD, quantized in some layers only", columns, tuple(rows))


def layer_table(arm: ArmReport) -> Table | None:
    """Clip rates and attention's error of each layer."""
    if not arm.layers:
        return None
    rows = tuple(
        (
            str(layer.layer_idx),
            percent(layer.k_clip_rate, 3),
            percent(layer.v_clip_rate, 3),
            percent(layer.attention_error, 3),
        )
        for layer in arm.layers
    )
    return Table("Layers", ("layer", "K clipped", "V clipped", "attention error"), rows)


def generation_table(report: EvaluationReport) -> Table | None:
    """One row per arm and temperature."""
    columns: tuple[tuple[str, Callable[[GenerationFigures], str]], ...] = (
        ("temperature", lambda of: f"{of.temperature:g}"),
        ("answers", lambda of: f"{of.num_answers:,}"),
        ("equal", lambda of: percent(of.exact_match, 1)),
        (
            "first difference",
            lambda of: (
                _NONE
                if of.median_first_divergence is None
                else f"token {of.median_first_divergence:.0f}"
            ),
        ),
        ("BLEU", lambda of: f"{of.bleu:.1f}"),
        ("ROUGE-1", lambda of: ratio(of.rouge1, 3)),
        ("ROUGE-2", lambda of: ratio(of.rouge2, 3)),
        ("ROUGE-L", lambda of: ratio(of.rouge_l, 3)),
        ("length", lambda of: f"{ratio(of.length_ratio, 3)} ×"),
        ("loops (baseline)", lambda of: _beside(percent, of.loops, of.loops_base)),
        ("distinct-2 (baseline)", lambda of: _beside(ratio, of.distinct_2, of.distinct_2_base)),
        ("end early", lambda of: percent(of.early_eos, 1)),
        ("end missing", lambda of: percent(of.missing_eos, 1)),
    )
    rows = tuple(
        (arm.name, *(cell(of) for _, cell in columns))
        for arm in report.arms
        for of in arm.generation
    )
    names = ("KV cache", *(name for name, _ in columns))
    return Table("Generation", names, rows) if rows else None


def _beside(written: Callable[[float, int], str], value: float, base: float) -> str:
    digits = 1 if written is percent else 3
    return f"{written(value, digits)} ({written(base, digits)})"


def task_table(report: EvaluationReport) -> Table | None:
    """One row per task, metric and arm."""
    rows = [
        (
            f"{of.task}, {of.metric}",
            arm.name,
            f"{of.num_items:,}",
            ratio(of.score_base, 3),
            ratio(of.score, 3),
            f"{points(of.drop)} ({points_interval(of.drop_low, of.drop_high)})",
            f"{of.p_value:.2g}",
            f"{of.only_base} / {of.only_arm}",
            of.conclusion,
        )
        for arm in report.arms
        for of in arm.tasks
    ]
    if not rows:
        return None
    order = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: order.index(row[0]))
    columns = (
        "task",
        "KV cache",
        "n",
        "baseline",
        "this cache",
        "points lost (95 % interval)",
        "p",
        "only baseline / only this right",
        "conclusion",
    )
    return Table("Tasks", columns, tuple(rows), frozenset({0, 1, 8}))


def retrieval_table(report: EvaluationReport) -> Table | None:
    """One row per arm."""
    rows = tuple(
        (
            arm.name,
            percent(arm.retrieval.found, 1),
            percent(arm.retrieval.found_base, 1),
            f"{arm.retrieval.logprob:.3f}",
            f"{arm.retrieval.logprob_base:.3f}",
        )
        for arm in report.arms
        if arm.retrieval
    )
    columns = ("KV cache", "found", "by the baseline", "log-probability", "of the baseline")
    return Table("Retrieval", columns, rows) if rows else None


def retrieval_grid(title: str, cells: Sequence[RetrievalCell]) -> Table:
    """Share found by depth (rows) and length (columns)."""
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    found = {(cell.length, cell.depth): cell.found for cell in cells}
    rows = tuple(
        (
            f"{depth:.0%}",
            *(percent(found[key], 0) if (key := (n, depth)) in found else _NONE for n in lengths),
        )
        for depth in depths
    )
    return Table(title, ("depth", *(f"{length:,} tokens" for length in lengths)), rows)


def cache_table(report: EvaluationReport) -> Table:
    """Formats of K and V, in words."""
    caches = [(report.baseline, report.baseline_cache)]
    caches += [(arm.name, arm.cache) for arm in report.arms]
    rows = tuple((name, cache.k, cache.v) for name, cache in caches)
    return Table("Formats", ("KV cache", "K", "V"), rows, frozenset({0, 1, 2}))


def limits(report: EvaluationReport) -> str:
    """The thresholds, in a sentence."""
    of = report.thresholds
    return (
        f"Unsafe: mean KLD above {kld(of.max_kld)}, same top p below {limit_percent(of.min_top1)}, "
        f"or more than {points(of.max_accuracy_drop)} points of a task lost and shown."
    )


def noise_floor(report: EvaluationReport) -> str:
    """The baseline against itself, in a sentence."""
    of = report.noise_floor
    return (
        f"Noise floor ({report.baseline} against itself, cut into other batches): mean KLD "
        f"{kld(of.kld.mean)}, maximum {kld(of.kld.maximum)}, same top p {percent(of.same_top_p)}, "
        f"{of.num_tokens:,} tokens."
    )


def facts(report: EvaluationReport) -> list[tuple[str, str]]:
    """What was compared, on what, by what."""
    data = report.data
    of = [
        ("model", f"{report.model} ({report.architecture})"),
        ("weights", report.weights),
        ("baseline", report.baseline),
        ("data", ", ".join(data.sources)),
        ("data SHA-256", data.sha256),
        ("windows", f"{data.num_windows:,} of up to {data.max_seq_len:,} tokens"),
        ("prompts", f"{data.num_prompts:,}"),
    ]
    of += [(name, _option(value)) for name, value in report.options.items()]
    return [*of, ("made by", report.tool)]


def _option(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or _NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _NONE if value is None else str(value)
