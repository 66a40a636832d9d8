"""Clips are counted, and said once when they are many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tightkv import LayerScales, TensorScale
from tiny_engine import prompts, tiny_llm
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def test_many_clips_are_said_once_and_by_layer(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide, narrow = (TensorScale(torch.tensor(value)) for value in (1.0, 1e-4))
    scales = {0: LayerScales(wide, wide), 1: LayerScales(wide, narrow)}
    llm = tiny_llm(folder, kv_cache_dtype="int8", kv_cache_scales=scales)
    llm.generate(prompts(2))
    llm.generate(prompts(2))
    k, v = llm.engine.stats.clip_rates[1]
    assert k == 0
    assert 0.5 < v <= 1
    assert llm.engine.stats.clip_rates[0] == (0.0, 0.0)
    warnings = [record for record in caplog.records if "clips" in record.message]
    assert len(warnings) == 1
    assert "Layer 1 clips 0.00 % of K and" in warnings[0].message


def test_a_dynamic_scale_clips_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = tiny_llm(folder, kv_cache_dtype="int8")
    llm.generate(prompts(2))
    assert set(llm.engine.stats.clip_rates.values()) == {(0.0, 0.0)}
    assert "clips" not in caplog.text
