"""Fidelity of a real model against a simulation that shares no code with the engine.

The simulation is plain transformers: K (after RoPE) and V of the whole text are quantized and
restored inside an attention function, by the formulas of docs/formats.md written down once more.
The expected values come from another such program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from real_model import smollm2, smollm2_folder
from tightkv import LLM, LayerScales, TensorScale
from tightkv.calibration.progress import no_progress
from tightkv.evaluation.arms import Arm, Arms
from tightkv.evaluation.fidelity import decode_parts, measure_fidelity
from tightkv.evaluation.journal import Journal
from tightkv.metrics import DivergenceFigures
from tightkv.models import LoadedModel
from tightkv.models.compatibility import quiet_transformers
from tiny_engine import loaded
from tiny_models import save_tiny_model

BUCKETS = (0, 512, 1024)

# With SmolLM2 on 2,048 tokens; the static scales there come from other windows than here.
EXPECTED = {
    "int8_per_token_head": 0.00084,
    "int8 tensor": 0.0040,
    "fp8_e4m3": 0.0095,
    "fp8_e5m2": 0.057,
}

Quantizer = Callable[[torch.Tensor, str], torch.Tensor]
"""Restored values of `[1, heads, tokens, size]`; the string is a layer and "k" or "v"."""


def per_token_head(largest: float, to_code: Callable[[torch.Tensor], torch.Tensor]) -> Quantizer:
    """A scale per token and head, rounded up to float16."""

    def restored(x: torch.Tensor, _name: str) -> torch.Tensor:
        wanted = (x.abs().amax(-1, keepdim=True) / largest).clamp_min(2**-14)
        nearest = wanted.half()
        above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
        scale = torch.where(nearest.float() < wanted, above, nearest).float()
        return to_code(x / scale) * scale

    return restored


def round_to_int8(y: torch.Tensor) -> torch.Tensor:
    return y.clamp(-127, 127).round()


def round_to_e4m3(y: torch.Tensor) -> torch.Tensor:
    """3 bits behind the point, down to steps of 2⁻⁹."""
    return round_to_bits(y.clamp(-448, 448), bits=3, smallest=-9)


def round_to_bits(y: torch.Tensor, bits: int, smallest: int) -> torch.Tensor:
    exponent = torch.frexp(y).exponent - 1
    step = torch.ldexp(torch.ones_like(y), (exponent - bits).clamp_min(smallest))
    return (y / step).round() * step


@dataclass
class Simulation:
    """A plain model whose attention quantizes.

    Attributes:
        absmax: largest magnitude seen of each layer's K and V.
    """

    model: PreTrainedModel
    absmax: dict[str, float] = field(default_factory=dict)
    quantizer: Quantizer | None = None

    @classmethod
    def load(cls, folder: Path) -> Simulation:
        with quiet_transformers():
            untyped: Any = AutoModelForCausalLM
            model = untyped.from_pretrained(folder, dtype=torch.float32)
        simulation = cls(model)
        AttentionInterface.register("simulation", simulation.attend)
        model.set_attn_implementation("simulation")
        return simulation

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: object,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        names = (f"{module.layer_idx} k", f"{module.layer_idx} v")
        for name, x in zip(names, (key, value), strict=True):
            self.absmax[name] = max(self.absmax.get(name, 0.0), float(x.abs().max()))
        if self.quantizer is not None:
            key, value = self.quantizer(key, names[0]), self.quantizer(value, names[1])
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=kwargs["scaling"], enable_gqa=True
        )
        return output.transpose(1, 2), None

    @torch.inference_mode()
    def logits(self, token_ids: list[int], quantizer: Quantizer | None = None) -> torch.Tensor:
        self.quantizer = quantizer
        rows: torch.Tensor = self.model(
            input_ids=torch.tensor([token_ids]), use_cache=False
        ).logits[0, :-1]
        return rows

    def absmax_on(self, windows: list[list[int]]) -> dict[str, float]:
        self.absmax.clear()
        self.quantizer = None
        for window in windows:
            with torch.inference_mode():
                self.model.model(input_ids=torch.tensor([window]), use_cache=False)
        return dict(self.absmax)


def kl_by_token(base: torch.Tensor, other: torch.Tensor) -> numpy.ndarray:
    """In pieces, since the whole is 400 MB in float32."""
    parts = []
    for p, q in zip(base.split(64), other.split(64), strict=True):
        p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        parts.append((p.exp() * (p - q)).sum(-1))
    values: numpy.ndarray = torch.cat(parts).numpy()
    return values


def engine_arms(model: LoadedModel, scales: dict[str, float], num_tokens: int) -> Arms:
    """The same formats as the simulation's, and the same static scales."""
    layers = {
        layer: LayerScales(
            *(TensorScale(torch.tensor(scales[f"{layer} {name}"] / 127)) for name in "kv")
        )
        for layer in range(len(scales) // 2)
    }
    sizes = {"max_model_len": num_tokens + 1, "max_num_seqs": 16, "max_num_batched_tokens": 512}

    def arm(name: str, dtype: str, **options: Any) -> Arm:
        return Arm(name, LLM(model, kv_cache_dtype=dtype, **sizes, **options).engine)

    static = arm("int8 tensor", "int8", kv_cache_scales=layers)
    dynamic = [arm(name, name) for name in EXPECTED if name != static.name]
    return Arms(arm("float32", "float32"), (*dynamic, static))


def compare(folder: Path, model: LoadedModel, num_tokens: int) -> dict[str, float]:
    """Mean KL of the prefill pass by format, after both passes have been compared.

    Means must agree within 3 standard errors and 10 %, and the formats be in the same order. Both
    programs quantize the same numbers up to rounding: a value near the middle between two codes
    can fall on either side, and so each token's KL differs a little, by nothing systematic. The
    engine's int8 kernels also round queries and weights to 16 bits, which is small beside 8.
    """
    text = model.tokenizer("\n\n".join(topics.values())).input_ids
    window, *others = (text[i * num_tokens : (i + 1) * num_tokens] for i in range(3))
    simulation = Simulation.load(folder)
    scales = simulation.absmax_on(others)
    steps = {name: largest / 127 for name, largest in scales.items()}
    quantizers: dict[str, Quantizer] = {
        "int8_per_token_head": per_token_head(127, round_to_int8),
        "fp8_e4m3": per_token_head(448, round_to_e4m3),
        "fp8_e5m2": lambda x, _: round_to_bits(x.clamp(-57344, 57344), bits=2, smallest=-16),
        "int8 tensor": lambda x, name: round_to_int8(x / steps[name]) * steps[name],
    }
    base = simulation.logits(window)
    simulated = {
        name: kl_by_token(base, simulation.logits(window, quantizer))
        for name, quantizer in quantizers.items()
    }
    del base
    arms = engine_arms(model, scales, num_tokens)
    found = measure_fidelity(arms, [window], BUCKETS, Journal(None, "test"), no_progress)
    parts = decode_parts(num_tokens, BUCKETS, 16)
    decoded = numpy.array([token - 1 for part in parts for token in part])
    for name, kl in simulated.items():
        assert_close(found[name]["prefill"].overall, kl, f"{name}, prefill")
        assert_close(found[name]["decode"].overall, kl[decoded], f"{name}, decode")
    means = {name: of["prefill"].overall.kld.mean for name, of in found.items()}
    assert sorted(means, key=means.__getitem__) == list(EXPECTED)
    assert sorted(simulated, key=lambda name: float(simulated[name].mean())) == list(EXPECTED)
    return means


def assert_close(figures: DivergenceFigures, expected: numpy.ndarray, what: str) -> None:
    mean, error = expected.mean(), expected.std(ddof=1) / len(expected) ** 0.5
    found = f"{what}: {figures.kld.mean:.6f}, simulated {mean:.6f} ± {error:.6f}"
    logging.getLogger(__name__).info(found)  # shown by pytest --log-cli-level=info
    assert figures.num_tokens == len(expected)
    assert abs(figures.kld.mean - mean) <= min(3 * error, 0.1 * mean), found


def test_a_tiny_model(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "llama")
    compare(folder, loaded(folder), 256)


@pytest.mark.slow
def test_a_real_model() -> None:
    torch.set_num_threads(2)  # it has work for both; `one_thread` sets the number back
    means = compare(smollm2_folder(), smollm2(), 2048)
    for name, expected in EXPECTED.items():
        assert means[name] == pytest.approx(expected, rel=0.25), name
