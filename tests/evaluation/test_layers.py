"""Errors of single layers: of the layer that has them, and as attention by hand gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tightkv import LLM, LayerScales, TensorScale
from tightkv.calibration.progress import no_progress
from tightkv.evaluation.arms import Arm, Arms
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.layers import measure_layers
from tightkv.evaluation.report import LayerFigures
from tightkv.models import AttentionCall, LoadedModel, attend_with
from tiny_engine import loaded, prompts
from tiny_models import save_tiny_model

WINDOWS = prompts(3, 90)
NUM_KV_HEADS, HEAD_SIZE = 2, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


def make_arm(model: LoadedModel, name: str, dtype: str, **options: Any) -> Arm:
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 20}
    return Arm(name, LLM(model, kv_cache_dtype=dtype, **sizes, **options).engine)


def per_tensor(k: list[float], v: list[float]) -> dict[int, LayerScales]:
    """One static scale for K and one for V of each layer."""
    pairs = enumerate(zip(k, v, strict=True))
    return {
        layer: LayerScales(*(TensorScale(torch.tensor(value)) for value in pair))
        for layer, pair in pairs
    }


def measure(
    model: LoadedModel, *arms: Arm, journal: Journal | None = None
) -> dict[str, tuple[LayerFigures, ...]]:
    base = make_arm(model, "baseline", "float32")
    return measure_layers(Arms(base, arms), WINDOWS, journal or Journal(None, "test"), no_progress)


def test_the_baseline_has_no_error(model: LoadedModel) -> None:
    (found,) = measure(model, make_arm(model, "float32", "float32")).values()
    expected = [
        LayerFigures(layer_idx=layer, k_clip_rate=0, v_clip_rate=0, attention_error=0)
        for layer in range(2)
    ]
    assert list(found) == expected


def test_a_skipped_layer_has_no_error(model: LoadedModel) -> None:
    arm = make_arm(model, "int8", "int8", kv_cache_dtype_skip_layers=("0",))
    (found,) = measure(model, arm).values()
    assert found[0].attention_error == 0
    assert 0 < found[1].attention_error < 0.001


def test_clips_of_k_and_v_apart(model: LoadedModel) -> None:
    """A scale that is too small clips its own tensor of its own layer."""
    arm = make_arm(model, "int8", "int8", kv_cache_scales=per_tensor([0.1, 0.1], [0.1, 0.001]))
    (found,) = measure(model, arm).values()
    assert [(of.k_clip_rate > 0, of.v_clip_rate > 0) for of in found] == [
        (False, False),
        (False, True),
    ]
    assert found[1].v_clip_rate < 1
    assert found[1].attention_error > 0.1 > found[0].attention_error


def test_by_hand(model: LoadedModel) -> None:
    """Static int8 in plain torch, as docs/formats.md says it."""
    scales = ([0.05, 0.02], [0.02, 0.05])
    arm = make_arm(model, "int8", "int8", kv_cache_scales=per_tensor(*scales))
    (found,) = measure(model, arm).values()
    sums = torch.zeros(2, 2, dtype=torch.float64)
    clips = torch.zeros(2, 2)

    def attend(call: AttentionCall) -> torch.Tensor:
        layer = call.layer_idx
        k, v = call.key.double(), call.value.double()
        s_k, s_v = scales[0][layer], scales[1][layer]
        exact = plain_attention(call, k, v)
        approximate = plain_attention(call, int8(k, s_k), int8(v, s_v))
        sums[layer] += torch.stack([((approximate - exact) ** 2).sum(), (exact**2).sum()])
        clips[layer] += torch.tensor(
            [(x.abs() >= 127.5 * s).double().sum() for x, s in ((k, s_k), (v, s_v))]
        )
        return exact.float()

    for window in WINDOWS[:2]:
        with attend_with(attend):
            model.model(
                input_ids=torch.tensor([window]),
                position_ids=torch.arange(len(window))[None],
                use_cache=False,
                logits_to_keep=1,
            )
    written = sum(map(len, WINDOWS[:2])) * NUM_KV_HEADS * HEAD_SIZE
    for layer, of in enumerate(found):
        assert of.attention_error == pytest.approx(float(sums[layer, 0] / sums[layer, 1]), rel=0.02)
        rates = (of.k_clip_rate, of.v_clip_rate)
        assert rates == pytest.approx(tuple((clips[layer] / written).tolist()), abs=2 / written)


def int8(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-127, 127).round() * scale


def plain_attention(call: AttentionCall, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of `[num_tokens, heads, size]` in float64."""
    q = call.query.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("qhc,khc->hqk", q, k) * call.params.softmax_scale
    future = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
    weights = logits.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khc->qhc", weights, v)


def test_the_journal_gives_the_same(model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    arms = [make_arm(model, "int8", "int8"), make_arm(model, "fp8", "fp8")]
    first = measure(model, *arms, journal=Journal(path, "run"))
    lines = path.read_bytes()
    again = measure(model, *arms, journal=Journal(path, "run"))
    assert again == first == measure(model, *arms)
    assert path.read_bytes() == lines
    assert first["int8"][0].attention_error < first["fp8"][0].attention_error


def test_progress(model: LoadedModel) -> None:
    calls: list[tuple[str, int, int]] = []
    base, arm = make_arm(model, "baseline", "float32"), make_arm(model, "int8", "int8")
    measure_layers(
        Arms(base, (arm,)),
        WINDOWS,
        Journal(None, "test"),
        lambda *call: calls.append(call),
    )
    done = [count for _, count, _ in calls]
    assert done == sorted(done)
    assert calls[-1] == ("layers", 4, 4)
