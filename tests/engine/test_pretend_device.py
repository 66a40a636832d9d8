"""The engine on a device: the CPU's tokens, one copy there and one back in each step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretend_device import PRETEND, Counts, PretendAccelerator, PretendBackend, on_pretend_device
from tightkv import LLM, SamplingParams
from tightkv.config import EngineConfig
from tightkv.engine.llm_engine import LLMEngine
from tightkv.models import load_model
from tiny_engine import GREEDY, prompts, tiny_llm, token_ids
from tiny_models import save_tiny_model

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 1 << 20,
    "max_model_len": 256,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module", autouse=True)
def counts() -> Iterator[Counts]:
    with on_pretend_device() as counts:
        yield counts


def pretend_llm(folder: Path, **options: Any) -> LLM:
    """As `tiny_llm`, on the device."""
    config = EngineConfig.from_options({"model": str(folder), **OPTIONS, **options})
    llm = LLM.__new__(LLM)
    llm._ids = itertools.count()
    llm.engine = LLMEngine(config, backend=PretendBackend(), accelerator=PretendAccelerator())
    return llm


def test_greedy(folder: Path) -> None:
    expected = token_ids(tiny_llm(folder), prompts())
    assert token_ids(pretend_llm(folder), prompts()) == expected
