"""A report such as a run on SmolLM2 gives, made from a few numbers per arm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tightkv.evaluation.report import (
    AnswerExample,
    ArmReport,
    BucketFigures,
    CacheFigures,
    DataEntry,
    EvaluationReport,
    FidelityPass,
    GenerationFigures,
    LayerFigures,
    LayerGroupFigures,
    RetrievalCell,
    RetrievalFigures,
    TaskFigures,
    Thresholds,
)
from tightkv.evaluation.verdict import judge
from tightkv.metrics import DivergenceFigures, Spread

BUCKETS = ((0, 512), (512, 1024), (1024, 2048), (2048, 4096))
NUM_LAYERS = 30
LIMITS = Thresholds(max_kld=0.02, min_top1=0.94, max_accuracy_drop=0.02)

HOSTILE = "<script>alert('x')</script> & <b>\"bold\"</b> | `code` ```"


@dataclass(frozen=True)
class Sketch:
    name: str
    cache: str
    bytes_per_token: float
    kld: float
    flips: float
    clip_rate: float = 0.0
    drop: float = 0.0


TOKEN_HEAD = "dynamic per token and head"

SKETCHES = (
    Sketch("int8@scales.json", f"int8 (static per channel, {TOKEN_HEAD})", 11880, 0.0003, 0.0098),
    Sketch("int8_per_token_head", f"int8 ({TOKEN_HEAD})", 11880, 0.00084, 0.0127),
    Sketch("int8@tensor.json", "int8 (static per tensor)", 11520, 0.0040, 0.0322, 0.0004, 0.004),
    Sketch("fp8_per_token_head", f"fp8_e4m3 ({TOKEN_HEAD})", 11880, 0.0095, 0.0415, 0, 0.008),
    Sketch("fp8_e4m3", "fp8_e4m3", 11520, 0.0188, 0.0572, 0.00002, 0.025),
    Sketch("fp8_e5m2", "fp8_e5m2", 11520, 0.057, 0.1011, 0.0, 0.048),
)


def sample_report(
    sketches: Sequence[Sketch] = SKETCHES,
    *,
    thresholds: Thresholds | None = None,
    is_full: bool = True,
    buckets: Sequence[tuple[int, int]] = BUCKETS,
) -> EvaluationReport:
    """With all sections, or with fidelity alone."""
    thresholds = thresholds or LIMITS
    return EvaluationReport(
        tool="tightkv 0.1.0",
        model="SmolLM2-135M-Instruct",
        architecture="LlamaForCausalLM",
        weights="5f" * 32,
        baseline="float32",
        baseline_cache=CacheFigures(
            k="float32", v="float32", bytes_per_token=46080, bits_per_value=32, tokens_ratio=1
        ),
        data=DataEntry(
            sources=("prompts.jsonl",),
            sha256="c0ffee" * 10 + "abcd",
            num_windows=8,
            max_seq_len=4096,
            num_prompts=24,
        ),
        options={
            "buckets": [begin for begin, _ in buckets],
            "layer_groups": 3,
            "seed": 0,
            "max_tokens": 256,
            "tasks": ["gsm8k=gsm8k.jsonl", "mmlu=mmlu.csv"] if is_full else [],
            "allow_code_execution": False,
            "calibration": None,
        },
        thresholds=thresholds,
        noise_floor=fidelity_figures(0.0, 0.0, 512),
        baseline_retrieval=retrieval_cells(0.0) if is_full else (),
        arms=tuple(arm_report(sketch, thresholds, is_full, buckets) for sketch in sketches),
    )


def arm_report(
    sketch: Sketch, thresholds: Thresholds, is_full: bool, buckets: Sequence[tuple[int, int]]
) -> ArmReport:
    fidelity = {
        "prefill": fidelity_pass(sketch, 1.0, buckets, 4096),
        "decode": fidelity_pass(sketch, 1.04, buckets, 2048),
    }
    extras = {
        "layer_groups": layer_groups(sketch),
        "layers": layer_figures(sketch),
        "generation": (generation_figures(sketch, 0.0), generation_figures(sketch, 0.8)),
        "tasks": (task_figures("gsm8k", sketch.drop, 1319), task_figures("mmlu", sketch.drop, 60)),
        "retrieval": retrieval_figures(sketch),
    }
    if not is_full:
        extras = {}
    verdict = judge(thresholds, fidelity, **extras, baseline_retrieval=retrieval_cells(0.0))  # type: ignore[arg-type]
    return ArmReport.model_validate(
        {
            "name": sketch.name,
            "cache": CacheFigures(
                k=f"{sketch.cache}, from data",
                v=sketch.cache,
                bytes_per_token=sketch.bytes_per_token,
                bits_per_value=sketch.bytes_per_token / 1440,
                tokens_ratio=46080 / sketch.bytes_per_token,
            ),
            "fidelity": fidelity,
            "verdict": verdict,
            **extras,
        }
    )


def fidelity_pass(
    sketch: Sketch, factor: float, buckets: Sequence[tuple[int, int]], num_tokens: int
) -> FidelityPass:
    def figures(share: float, part: float) -> DivergenceFigures:
        return fidelity_figures(
            sketch.kld * factor * part, sketch.flips * math.sqrt(part), int(num_tokens * share)
        )

    middle = (len(buckets) - 1) / 2
    return FidelityPass(
        overall=figures(1.0, 1.0),
        buckets=tuple(
            BucketFigures(
                begin=begin,
                end=end,
                figures=figures(1 / len(buckets), 1 + 0.12 * (index - middle)),
            )
            for index, (begin, end) in enumerate(buckets)
        ),
    )


def fidelity_figures(
    kld: float, flips: float, num_tokens: int, *, kld_error: float | None = None
) -> DivergenceFigures:
    error = 3.1 * kld / math.sqrt(num_tokens) if kld_error is None else kld_error
    ln_ratio = kld / 2
    spread = math.sqrt(kld)
    return DivergenceFigures(
        num_tokens=num_tokens,
        ppl=11.883 * math.exp(ln_ratio),
        ppl_standard_error=0.4,
        ppl_base=11.883,
        ppl_base_standard_error=0.4,
        ln_ratio=ln_ratio,
        ln_ratio_standard_error=spread / math.sqrt(num_tokens),
        ppl_ratio=math.exp(ln_ratio),
        ppl_ratio_standard_error=spread / math.sqrt(num_tokens),
        ppl_difference=11.883 * (math.exp(ln_ratio) - 1),
        ppl_difference_standard_error=12 * spread / math.sqrt(num_tokens),
        ln_correlation=1 - kld,
        kld=distribution(kld, error, (60, 22, 8.2, 3.5, 2.2, 0.4, 0.02, 0.004, 0.0001), 160),
        delta_p=Spread(
            mean=-kld / 4,
            standard_error=spread / math.sqrt(num_tokens),
            minimum=-4 * spread,
            maximum=3.6 * spread,
            quantiles={"99%": 1.9 * spread, "median": 0.0, "1%": -2.1 * spread},
        ),
        rms_delta_p=0.4 * spread,
        rms_delta_p_standard_error=0.1 * spread,
        same_top_p=1 - flips,
        same_top_p_standard_error=math.sqrt(flips * (1 - flips) / num_tokens),
    )


def distribution(mean: float, error: float, factors: Sequence[float], largest: float) -> Spread:
    names = ("99.9%", "99.5%", "99%", "95%", "90%", "median", "10%", "5%", "1%")
    return Spread(
        mean=mean,
        standard_error=error,
        minimum=0.0,
        maximum=largest * mean,
        quantiles={name: factor * mean for name, factor in zip(names, factors, strict=True)},
    )


def layer_groups(sketch: Sketch) -> tuple[LayerGroupFigures, ...]:
    return tuple(
        LayerGroupFigures(
            layers=layers, figures=fidelity_figures(sketch.kld * part, sketch.flips * part, 2048)
        )
        for layers, part in (("0-9", 0.55), ("10-19", 0.25), ("20-29", 0.2))
    )


def layer_figures(sketch: Sketch) -> tuple[LayerFigures, ...]:
    return tuple(
        LayerFigures(
            layer_idx=index,
            k_clip_rate=sketch.clip_rate * (1 + math.sin(index)) / 2,
            v_clip_rate=sketch.clip_rate * (1 + math.cos(3 * index)) / 8,
            attention_error=sketch.kld * 0.08 * (1.3 + math.sin(1.7 * index)),
        )
        for index in range(NUM_LAYERS)
    )


def generation_figures(sketch: Sketch, temperature: float) -> GenerationFigures:
    equal = math.exp(-40 * sketch.flips)
    return GenerationFigures(
        num_answers=24,
        temperature=temperature,
        exact_match=equal,
        median_first_divergence=0.7 / sketch.flips if equal < 1 else None,
        bleu=100 * (1 - 3 * sketch.flips),
        rouge1=1 - 1.5 * sketch.flips,
        rouge2=1 - 2.5 * sketch.flips,
        rouge_l=1 - 2 * sketch.flips,
        length_ratio=1 + sketch.flips / 5,
        loops=0.0417 + sketch.flips / 3,
        loops_base=0.0417,
        distinct_2=0.93 - sketch.flips / 4,
        distinct_2_base=0.93,
        early_eos=sketch.flips / 6,
        missing_eos=sketch.flips / 8,
        examples=examples(),
    )


def examples() -> tuple[AnswerExample, ...]:
    return (
        AnswerExample(
            prompt=f"What does this page show? {HOSTILE}",
            base=(
                "The page shows a script element, a bold word and some text.\n\n"
                "1. The script asks for a dialogue.\n2. The bold word is written with a tag."
            ),
            answer=(
                "The page shows a script element, a bold word and some text.\n\n"
                "1. The browser runs the script, <i>if</i> it is allowed to.\n"
                "2. It is allowed to, it is allowed to, it is allowed to, it is allowed to"
            ),
            first_divergence=17,
            rouge_l=0.613,
        ),
        AnswerExample(
            prompt="用三句话解释什么是键值缓存。",
            base="键值缓存保存已经算过的键和值。这样每个新词只需要计算一次注意力。它占用的内存随上下文增长。",
            answer="键值缓存保存已经算过的键和值。因此模型不必重复计算前面的内容。",
            first_divergence=14,
            rouge_l=0.702,
        ),
        AnswerExample(
            prompt="Count to ten.",
            base="1, 2, 3, 4, 5, 6, 7, 8, 9, 10.",
            answer="1, 2, 3, 4, 5, 6, 7, 8, 9, 10. And eleven.",
            first_divergence=30,
            rouge_l=0.91,
        ),
    )


def task_figures(
    task: str, drop: float, num_items: int, *, interval: tuple[float, float] | None = None
) -> TaskFigures:
    half = 0.62 / math.sqrt(num_items)
    low, high = interval or (drop - half, drop + half)
    is_shown = low > 0 or high < 0
    only_base = round(num_items * (0.02 + max(drop, 0)))
    return TaskFigures(
        task=task,
        metric="exact_match,flexible" if task == "gsm8k" else "acc",
        num_items=num_items,
        score=0.412 - drop,
        score_base=0.412,
        only_base=only_base,
        only_arm=only_base - round(num_items * drop),
        drop=drop,
        drop_low=low,
        drop_high=high,
        p_value=0.003 if is_shown else 0.62,
        test="exact McNemar",
        conclusion=(
            f"{100 * drop:.1f} points are lost."
            if is_shown
            else f"No difference could be shown at n = {num_items}."
        ),
    )


def retrieval_cells(loss: float) -> tuple[RetrievalCell, ...]:
    return tuple(
        RetrievalCell(
            length=length,
            depth=depth,
            found=max(0.0, 1 - (0.02 + 8 * loss) * length / 1024 * (0.4 + depth * (1 - depth))),
            logprob=-0.1 - length / 8192 - 5 * loss,
        )
        for length in (512, 1024, 2048, 4096)
        for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
    )


def retrieval_figures(sketch: Sketch) -> RetrievalFigures:
    cells, base = retrieval_cells(sketch.kld / 20), retrieval_cells(0.0)
    return RetrievalFigures(
        cells=cells,
        found=sum(cell.found for cell in cells) / len(cells),
        found_base=sum(cell.found for cell in base) / len(base),
        logprob=sum(cell.logprob for cell in cells) / len(cells),
        logprob_base=sum(cell.logprob for cell in base) / len(base),
    )
