from __future__ import annotations

import math
from typing import Any

import pytest

from evaluation.sample_report import (
    BUCKETS,
    LIMITS,
    SKETCHES,
    Sketch,
    fidelity_figures,
    fidelity_pass,
    generation_figures,
    retrieval_cells,
    sample_report,
    task_figures,
)
from tightkv.evaluation.report import (
    BucketFigures,
    FidelityPass,
    LayerFigures,
    PassName,
    RetrievalCell,
    RetrievalFigures,
    Verdict,
)
from tightkv.evaluation.verdict import judge
from tightkv.metrics import DivergenceFigures

NUM_TOKENS = 4096


def one_pass(
    kld: float = 0.001,
    *,
    error: float = 1e-5,
    flips: float = 0.01,
    buckets: tuple[DivergenceFigures, ...] = (),
) -> FidelityPass:
    return FidelityPass(
        overall=fidelity_figures(kld, flips, NUM_TOKENS, kld_error=error),
        buckets=tuple(
            BucketFigures(begin=512 * i, end=512 * (i + 1), figures=figures)
            for i, figures in enumerate(buckets)
        ),
    )


def both(read: FidelityPass) -> dict[PassName, FidelityPass]:
    return {"prefill": read, "decode": read}


def layer(**fields: float) -> LayerFigures:
    values = {"k_clip_rate": 0.0, "v_clip_rate": 0.0, "attention_error": 0.0, **fields}
    return LayerFigures.model_validate({"layer_idx": 7, **values})


def retrieval(founds: list[float]) -> dict[str, Any]:
    def cell(index: int, found: float) -> RetrievalCell:
        return RetrievalCell(length=512 * (index + 1), depth=0.5, found=found, logprob=-1.0)

    figures = RetrievalFigures(
        cells=tuple(cell(i, found) for i, found in enumerate(founds)),
        found=sum(founds) / len(founds),
        found_base=1.0,
        logprob=-1.0,
        logprob_base=-1.0,
    )
    base = tuple(cell(i, 1.0) for i in range(len(founds)))
    return {"retrieval": figures, "baseline_retrieval": base}


def loops(share: float) -> dict[str, Any]:
    figures = generation_figures(SKETCHES[0], 0.0)
    return {"generation": (figures.model_copy(update={"loops": share, "loops_base": 0.1}),)}


def task(drop: float, low: float, high: float) -> dict[str, Any]:
    return {"tasks": (task_figures("gsm8k", drop, 200, interval=(low, high)),)}


GOOD = both(one_pass())
HIGH_BUCKET = fidelity_figures(0.03, 0.01, 512, kld_error=0.002)
NOISY_BUCKET = fidelity_figures(0.03, 0.01, 512, kld_error=0.02)
FLIPPED_BUCKET = fidelity_figures(0.001, 0.10, 512)

CASES: dict[str, tuple[dict[PassName, FidelityPass], dict[str, Any], str, str]] = {
    "all good": (GOOD, {}, "safe", "at most 0.02"),
    "kld at the limit": (both(one_pass(0.02, error=0.0)), {}, "safe", "0.02 (prefill)"),
    "kld above": (both(one_pass(0.0201)), {}, "unsafe", "above 0.02"),
    "kld of decode above": (
        {"prefill": one_pass(0.015), "decode": one_pass(0.03)},
        {},
        "unsafe",
        "Decode: mean KLD",
    ),
    "kld near": (both(one_pass(0.0185, error=0.001)), {}, "caution", "two standard errors of 0.02"),
    "kld near, well measured": (both(one_pass(0.0185, error=0.0005)), {}, "safe", "0.0185"),
    "top below": (both(one_pass(flips=0.061)), {}, "unsafe", "93.90 % ± 0.37 %, below 94 %"),
    "top near": (both(one_pass(flips=0.058)), {}, "caution", "two standard errors of 94 %"),
    "top enough": (both(one_pass(flips=0.05)), {}, "safe", "at least 94 %"),
    "bucket": (
        both(one_pass(buckets=(HIGH_BUCKET, HIGH_BUCKET))),
        {},
        "caution",
        "at positions 0–511: 0.03; 512–1,023: 0.03",  # noqa: RUF001
    ),
    "bucket within noise": (both(one_pass(buckets=(NOISY_BUCKET,))), {}, "safe", ""),
    "bucket's top": (both(one_pass(buckets=(FLIPPED_BUCKET,))), {}, "caution", "below 94 % at"),
    "decode apart": (
        {"prefill": one_pass(0.001), "decode": one_pass(0.0031)},
        {},
        "caution",
        "fault of the decode kernel",
    ),
    "prefill apart": (
        {"prefill": one_pass(0.0031), "decode": one_pass(0.001)},
        {},
        "caution",
        "fault of the prefill kernel",
    ),
    "decode less than three times": (
        {"prefill": one_pass(0.001), "decode": one_pass(0.0029)},
        {},
        "safe",
        "",
    ),
    "decode apart within noise": (
        {"prefill": one_pass(0.001), "decode": one_pass(0.004, error=0.002)},
        {},
        "safe",
        "",
    ),
    "passes apart far below what matters": (
        {"prefill": one_pass(1e-7, error=1e-9), "decode": one_pass(5e-6, error=1e-9)},
        {},
        "safe",
        "",
    ),
    "one pass": ({"decode": one_pass()}, {}, "safe", "(decode)"),
    "no pass": ({}, {}, "caution", "No text was compared"),
    "drop": (GOOD, task(0.03, 0.01, 0.05), "unsafe", "3 points lost (95 % interval 1 to 5)"),
    "drop not shown": (GOOD, task(0.03, -0.01, 0.07), "caution", "n = 200 cannot show it"),
    "drop at the limit": (GOOD, task(0.02, 0.01, 0.03), "safe", "no task lost more than 2 points"),
    "gain": (GOOD, task(-0.05, -0.07, -0.03), "safe", ""),
    "needles": (GOOD, retrieval([1, 0.5, 0.5, 0.5]), "unsafe", "37.5 points lost"),
    "needles not shown": (GOOD, retrieval([1, 1, 1, 0.5]), "caution", "4 cells cannot show it"),
    "needles found": (GOOD, retrieval([1, 1, 0.99, 1]), "safe", ""),
    "loops": (GOOD, loops(0.16), "caution", "16.00 % of the answers"),
    "loops as before": (GOOD, loops(0.14), "safe", ""),
    "clipped": (GOOD, {"layers": (layer(v_clip_rate=0.011),)}, "caution", "Layer 7 by itself"),
    "lost": (GOOD, {"layers": (layer(attention_error=0.011),) * 2}, "caution", "1 other layer too"),
    "layer within": (GOOD, {"layers": (layer(k_clip_rate=0.01),)}, "safe", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_each_limit(name: str) -> None:
    fidelity, others, level, part = CASES[name]
    verdict = judge(LIMITS, fidelity, **others)
    assert verdict.level == level
    assert part in " ".join(verdict.reasons)
    assert verdict.reasons
    assert all(reason.endswith(".") and "\n" not in reason for reason in verdict.reasons)


def test_reasons_of_the_worst_level_come_first() -> None:
    verdict = judge(LIMITS, GOOD, **loops(0.5), **task(0.1, 0.08, 0.12))
    assert verdict.level == "unsafe"
    assert [reason.split()[0] for reason in verdict.reasons] == ["gsm8k", "50.00"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_no_number_is_unsafe(value: float) -> None:
    bad = one_pass(buckets=(fidelity_figures(0.001, 0.01, 512, kld_error=value),))
    verdict = judge(LIMITS, {"prefill": one_pass(), "decode": bad})
    assert verdict.level == "unsafe"
    assert verdict.reasons[0].startswith("decode.buckets.figures.kld.standard_error: NaN")
    nan = judge(LIMITS, both(one_pass(math.nan, error=math.nan)))
    assert nan.level == "unsafe"


def test_a_metric_that_is_no_share_has_no_limit() -> None:
    perplexity = task_figures("wikitext", 0.5, 100, interval=(0.4, 0.6))
    moved = perplexity.model_copy(update={"score": 11.5, "score_base": 12.0})
    assert judge(LIMITS, GOOD, tasks=(moved,)).level == "safe"


def test_the_formats_of_the_simulation() -> None:
    """INT8 in any form is safe on SmolLM2, E4M3 at the edge, E5M2 and INT4 are not."""

    def of(kld: float, flips: float) -> Verdict:
        sketch = Sketch("", "", 1, kld, flips)
        return judge(
            LIMITS,
            {
                "prefill": fidelity_pass(sketch, 1, BUCKETS[:1], NUM_TOKENS),
                "decode": fidelity_pass(sketch, 1, BUCKETS[:1], NUM_TOKENS),
            },
        )

    levels = [of(*figures).level for figures in ((0.0003, 0.01), (0.004, 0.032), (0.0095, 0.041))]
    assert levels == ["safe"] * 3
    assert of(0.0168, 0.0572).level == "caution"
    assert [of(0.057, 0.101).level, of(0.049, 0.1045).level] == ["unsafe"] * 2


def test_passed_wants_no_unsafe_arm() -> None:
    report = sample_report(is_full=False)
    assert [arm.verdict.level for arm in report.arms][-2:] == ["caution", "unsafe"]
    assert not report.passed
    assert report.model_copy(update={"arms": report.arms[:-1]}).passed
    assert len(retrieval_cells(0.0)) == 20
