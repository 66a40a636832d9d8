"""Whether an arm may be served, by stated limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from tightkv.evaluation.render.numbers import (
    kld,
    limit_percent,
    percent,
    points,
    points_interval,
    positions,
    with_error,
)
from tightkv.evaluation.report import (
    FidelityPass,
    GenerationFigures,
    LayerFigures,
    LayerGroupFigures,
    Level,
    PassName,
    RetrievalCell,
    RetrievalFigures,
    TaskFigures,
    Thresholds,
    Verdict,
)
from tightkv.metrics import DivergenceFigures

__all__ = ["judge"]

# A mean lies within two of its standard errors in 95 of 100 cases.
_NEAR = 2.0
# There are ten buckets and more, each of few tokens: noise alone puts some of them over a limit.
_BUCKET_MARGIN = 1.0
# A bfloat16 cache costs 0.00005; differences of that size between passes are rounding.
_NOTABLE_KLD = 1e-4
# The passes read the same codes: only the positions that they cover set them apart.
_PASS_RATIO = 3.0
# One answer in twenty; single prompts loop by chance.
_MORE_LOOPS = 0.05
# Clips: ten times the rate at which the server warns. Error: where calibration calls a layer hurt.
_CLIP_RATE, _ATTENTION_ERROR = 0.01, 0.01

_SEVERITY: dict[Level, int] = {"unsafe": 0, "caution": 1, "safe": 2}

Finding = tuple[Level, str]


def judge(
    thresholds: Thresholds,
    fidelity: Mapping[PassName, FidelityPass],
    *,
    layer_groups: Sequence[LayerGroupFigures] = (),
    layers: Sequence[LayerFigures] = (),
    generation: Sequence[GenerationFigures] = (),
    tasks: Sequence[TaskFigures] = (),
    retrieval: RetrievalFigures | None = None,
    baseline_retrieval: Sequence[RetrievalCell] = (),
) -> Verdict:
    """Compare one arm's figures with the limits.

    Args:
        thresholds: the limits.
        fidelity: the passes that were measured.
        layer_groups, layers, generation, tasks, retrieval: what else was.
        baseline_retrieval: the baseline's cells, as many as the arm's.

    Returns:
        `unsafe` if a limit is exceeded or a figure is not finite, `caution` if something is to be
        looked at, else `safe`; the reasons of the worst level come first.
    """
    measured = (fidelity, layer_groups, layers, generation, tasks, retrieval)
    findings = [
        *_not_finite(measured),
        *_passes(fidelity, thresholds),
        *_between_passes(fidelity),
        *(finding for task in tasks for finding in _task(task, thresholds)),
        *_retrieval(retrieval, baseline_retrieval, thresholds),
        *_loops(generation),
        *_layers(layers),
    ]
    if not findings:
        return Verdict(level="safe", reasons=(_within(fidelity, tasks, thresholds),))
    findings.sort(key=lambda finding: _SEVERITY[finding[0]])
    return Verdict(level=findings[0][0], reasons=tuple(sentence for _, sentence in findings))


def _not_finite(measured: object) -> Iterator[Finding]:
    places = [place for place, value in _numbers(measured, "") if not math.isfinite(value)]
    if places:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield "unsafe", f"{places[0]}{more}: NaN or infinite, where a number should be."


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    """All floats in it, each with its place, as "prefill.overall.ppl"."""
    if isinstance(value, float):
        yield place, value
    elif isinstance(value, BaseModel):
        yield from _numbers(dict(value), place)
    elif isinstance(value, DivergenceFigures):
        yield from _numbers(asdict(value), place)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _numbers(item, place)


def _passes(fidelity: Mapping[PassName, FidelityPass], thresholds: Thresholds) -> Iterator[Finding]:
    if not fidelity:
        yield "caution", "No text was compared token by token, so nothing is known of its KLD."
    for name, read in fidelity.items():
        yield from _kld(name.capitalize(), read, thresholds.max_kld)
        yield from _same_top(name.capitalize(), read, thresholds.min_top1)


def _kld(name: str, read: FidelityPass, limit: float) -> Iterator[Finding]:
    mean, error = read.overall.kld.mean, read.overall.kld.standard_error
    if mean > limit:
        yield "unsafe", f"{name}: mean KLD is {with_error(mean, error)}, above {kld(limit)}."
        return
    if mean + _NEAR * error > limit:
        yield (
            "caution",
            f"{name}: mean KLD is {with_error(mean, error)}, within two standard errors of "
            f"{kld(limit)}.",
        )
    beyond = [
        f"{positions(bucket.begin, bucket.end)}: {kld(bucket.figures.kld.mean)}"
        for bucket in read.buckets
        if bucket.figures.kld.mean - _BUCKET_MARGIN * bucket.figures.kld.standard_error > limit
    ]
    if beyond:
        yield (
            "caution",
            f"{name}: mean KLD is above {kld(limit)} at positions {'; '.join(beyond)}.",
        )


def _same_top(name: str, read: FidelityPass, limit: float) -> Iterator[Finding]:
    share, error = read.overall.same_top_p, read.overall.same_top_p_standard_error
    stated = f"{name}: same top p is {percent(share)} ± {percent(error)}"
    if share < limit:
        yield "unsafe", f"{stated}, below {limit_percent(limit)}."
        return
    if share - _NEAR * error < limit:
        yield "caution", f"{stated}, within two standard errors of {limit_percent(limit)}."
    beyond = [
        f"{positions(bucket.begin, bucket.end)}: {percent(bucket.figures.same_top_p)}"
        for bucket in read.buckets
        if _highest_top(bucket.figures) < limit
    ]
    if beyond:
        yield (
            "caution",
            f"{name}: same top p is below {limit_percent(limit)} at positions {'; '.join(beyond)}.",
        )


def _highest_top(figures: DivergenceFigures) -> float:
    return figures.same_top_p + _BUCKET_MARGIN * figures.same_top_p_standard_error


def _between_passes(fidelity: Mapping[PassName, FidelityPass]) -> Iterator[Finding]:
    if len(fidelity) < 2:
        return
    less, more = sorted(fidelity, key=lambda name: fidelity[name].overall.kld.mean)
    low, high = fidelity[less].overall.kld, fidelity[more].overall.kld
    noise = _NEAR * math.hypot(low.standard_error, high.standard_error)
    if high.mean > _PASS_RATIO * low.mean and high.mean - low.mean > max(noise, _NOTABLE_KLD):
        yield (
            "caution",
            f"{more.capitalize()}'s mean KLD, {kld(high.mean)}, is more than {_PASS_RATIO:.0f} "
            f"times {less}'s, {kld(low.mean)}: both read the same cache, so this looks like a "
            f"fault of the {more} kernel or of its scales.",
        )


def _task(task: TaskFigures, thresholds: Thresholds) -> Iterator[Finding]:
    limit = thresholds.max_accuracy_drop
    is_share = 0 <= task.score <= 1 and 0 <= task.score_base <= 1
    if not is_share or task.drop <= limit:
        return
    stated = (
        f"{task.task} ({task.metric}): {points(task.drop)} points lost "
        f"(95 % interval {points_interval(task.drop_low, task.drop_high)}), above {points(limit)}"
    )
    if task.drop_low > 0:
        yield "unsafe", f"{stated}."
    else:
        yield "caution", f"{stated}, though n = {task.num_items} cannot show it: ask more items."


def _retrieval(
    found: RetrievalFigures | None, base: Sequence[RetrievalCell], thresholds: Thresholds
) -> Iterator[Finding]:
    limit = thresholds.max_accuracy_drop
    if found is None or not found.found_base - found.found > limit:
        return
    stated = (
        f"Retrieval: {percent(found.found)} of the hidden words found, {percent(found.found_base)} "
        f"by the baseline: {points(found.found_base - found.found)} points lost, "
        f"above {points(limit)}"
    )
    drops = [cell.found - other.found for cell, other in zip(base, found.cells, strict=False)]
    # Cells are independent of each other; trials within one share length and depth.
    shown = len(drops) > 1 and statistics.fmean(drops) > _NEAR * statistics.stdev(drops) / (
        len(drops) ** 0.5
    )
    if shown:
        yield "unsafe", f"{stated}."
    else:
        yield "caution", f"{stated}, though {len(drops)} cells cannot show it: ask more."


def _loops(generation: Sequence[GenerationFigures]) -> Iterator[Finding]:
    for figures in generation:
        if figures.loops - figures.loops_base > _MORE_LOOPS:
            yield (
                "caution",
                f"{percent(figures.loops)} of the answers at temperature {figures.temperature:g} "
                f"end in a loop, of the baseline's {percent(figures.loops_base)}.",
            )


def _layers(layers: Sequence[LayerFigures]) -> Iterator[Finding]:
    clipped = [(max(layer.k_clip_rate, layer.v_clip_rate), layer) for layer in layers]
    lost = [(layer.attention_error, layer) for layer in layers]
    for verb, limit, shares in (("clips", _CLIP_RATE, clipped), ("loses", _ATTENTION_ERROR, lost)):
        beyond = [(share, layer) for share, layer in shares if share > limit]
        if not beyond:
            continue
        share, worst = max(beyond, key=lambda pair: pair[0])
        part = "of attention's output"
        if verb == "clips":
            part = "of K" if worst.k_clip_rate >= worst.v_clip_rate else "of V"
        others = f" ({_others(len(beyond) - 1)} too)" if len(beyond) > 1 else ""
        yield (
            "caution",
            f"Layer {worst.layer_idx} by itself {verb} {percent(share)} {part}, above "
            f"{limit_percent(limit)}{others}: leave it unquantized, or calibrate.",
        )


def _others(count: int) -> str:
    return f"{count} other layer{'s' if count > 1 else ''}"


def _within(
    fidelity: Mapping[PassName, FidelityPass], tasks: Sequence[TaskFigures], limits: Thresholds
) -> str:
    """What makes it safe, by how much."""
    klds = ", ".join(f"{kld(read.overall.kld.mean)} ({name})" for name, read in fidelity.items())
    tops = ", ".join(f"{percent(read.overall.same_top_p)}" for read in fidelity.values())
    sentence = (
        f"Mean KLD {klds}, at most {kld(limits.max_kld)}; same top p {tops}, at least "
        f"{limit_percent(limits.min_top1)}"
    )
    if tasks:
        fewest = min(task.num_items for task in tasks)
        sentence += (
            f"; no task lost more than {points(limits.max_accuracy_drop)} points (n = {fewest:,}"
            f"{' and more' if len(tasks) > 1 else ''})"
        )
    return f"{sentence}."
