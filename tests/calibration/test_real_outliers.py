"""Outliers put into a real model: calibration names their layers, and its scales survive them."""

from __future__ import annotations

from functools import lru_cache
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from real_model import smollm2, smollm2_with_outliers
from tightkv import LLM, LayerScales, SamplingParams
from tightkv.calibration import calibrate
from tightkv.formats import KVCachePolicy
from tightkv.metrics import kl_divergence
from tightkv.models import LoadedModel

pytestmark = pytest.mark.slow

LAYERS = (0, 29)
SMALL: dict[str, Any] = {"num_samples": 4, "max_seq_len": 256, "max_model_len": 1024}
TEXT = "\n\n".join(topics.values())
CALIBRATION_TEXT, MEASURED_TEXT = TEXT[100_000:140_000], TEXT[:2_500]


def logits(model: LoadedModel, **options: Any) -> torch.Tensor:
    llm = LLM(model, max_model_len=1024, max_num_seqs=1, **options)
    rows: list[torch.Tensor] = []
    llm.engine.observe_logits(lambda _, position, row: rows.append(row.clone()))
    params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0, detokenize=False)
    llm.generate([llm.engine.tokenize(MEASURED_TEXT)], params)
    return torch.stack(rows)


def kl(model: LoadedModel, base: torch.Tensor, **options: Any) -> float:
    return float(kl_divergence(base, logits(model, **options)).mean())


def scales(policy: KVCachePolicy) -> dict[int, LayerScales]:
    return {layer: LayerScales(of.k.scale, of.v.scale) for layer, of in policy.items()}


@lru_cache(maxsize=1)
def clean_divergences() -> tuple[float, float]:
    """Of the model without outliers: two-factor scales calibrated, and by probe."""
    base = logits(smollm2())
    policy = calibrate(smollm2(), [CALIBRATION_TEXT], **SMALL).file.policy("")
    calibrated = kl(smollm2(), base, kv_cache_dtype="int8", kv_cache_scales=scales(policy))
    return calibrated, kl(smollm2(), base, kv_cache_dtype="int8")


@pytest.mark.parametrize("factor", [30.0, 150.0, 1500.0])
def test_outliers_in_the_first_and_the_last_layer(factor: float) -> None:
    model = smollm2_with_outliers(LAYERS, factor)
    result = calibrate(model, [CALIBRATION_TEXT], **SMALL)
    (remark,) = result.remarks
    assert remark.startswith("K of layers 0, 29 has outliers")
    clean, clean_probed = clean_divergences()
    base = logits(model)
    two_factor = kl(
        model, base, kv_cache_dtype="int8", kv_cache_scales=scales(result.file.policy(""))
    )
    probed = kl(model, base, kv_cache_dtype="int8")
    per_tensor = calibrate(
        model, [CALIBRATION_TEXT], static=True, granularity="tensor", **SMALL
    ).file.policy("")
    collapsed = kl(model, base, kv_cache_dtype="int8", kv_cache_scales=scales(per_tensor))

    assert two_factor < 2 * clean
    assert probed < 2 * clean_probed
    assert collapsed > 20 * clean


def test_a_clean_model_is_not_warned_of() -> None:
    assert calibrate(smollm2(), [CALIBRATION_TEXT], **SMALL).remarks == ()
