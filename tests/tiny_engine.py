"""Engines on tiny models, with settings that tests vary."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tightkv import LLM, SamplingParams
from tightkv.config import ModelConfig
from tightkv.models import LoadedModel, load_model
from tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def prompts(count: int = 4, length: int = 37) -> list[list[int]]:
    """Different token ids of different lengths around `length`."""
    return [
        [(17 * i + 5 * j * j + 3 * i * j) % (VOCAB_SIZE - 4) for j in range(length + 5 * i)]
        for i in range(count)
    ]


def tiny_llm(folder: Path, **options: Any) -> LLM:
    """An engine of at most 4 sequences; pass `pool_tokens` to size its pool in tokens.

    It checks its notes after every step, and overwrites lost blocks.
    """
    pool_tokens = options.pop("pool_tokens", 1024)
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "debug_integrity": True}
    options = {**defaults, **options}
    model = loaded(folder)
    plan = LLM(model, kv_cache_memory_bytes=64 << 20, **options).engine.plan
    num_blocks = -(-pool_tokens // plan.block_size)
    return LLM(model, kv_cache_memory_bytes=num_blocks * plan.bytes_per_block, **options)


@lru_cache(maxsize=4)
def loaded(folder: Path) -> LoadedModel:
    """The model of a folder, loaded once."""
    return load_model(ModelConfig(model=str(folder)), torch.device("cpu"))


def token_ids(
    llm: LLM, inputs: list[list[int]], params: SamplingParams = GREEDY
) -> list[list[int]]:
    """The answers' tokens; afterwards nothing may be left in the engine."""
    outputs = llm.generate(inputs, params)
    manager = llm.engine.manager
    manager.check_integrity()
    assert manager.num_sequences == 0
    assert manager.num_free_blocks == manager.num_blocks
    return [list(output.outputs[0].token_ids) for output in outputs]


def logits_by_position(
    llm: LLM, prompt: list[int], params: SamplingParams
) -> dict[int, torch.Tensor]:
    """Logits after each position that the engine made any for."""
    seen: dict[int, torch.Tensor] = {}
    llm.engine.observe_logits(lambda _, position, row: seen.update({position: row.clone()}))
    llm.generate([prompt], params)
    llm.engine.observe_logits(None)
    return seen
