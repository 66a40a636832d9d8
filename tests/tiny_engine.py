"""Engines on tiny models, with settings that tests vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import VOCAB_SIZE

from tightkv import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompts(count: int = 4, length: int = 37) -> list[list[int]]:
    """Different token ids of different lengths around `length`."""
    return [
        [(17 * i + 5 * j * j + 3 * i * j) % (VOCAB_SIZE - 4) for j in range(length + 5 * i)]
        for i in range(count)
    ]


def tiny_llm(folder: Path, **options: Any) -> LLM:
    """An engine of at most 4 sequences; pass `pool_tokens` to size its pool in tokens."""
    pool_tokens = options.pop("pool_tokens", 1024)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
    probe = LLM(str(folder), kv_cache_memory_bytes=64 << 20, **options)
    per_block = probe.engine.plan.bytes_per_block
    num_bytes = per_block * -(-pool_tokens // probe.engine.plan.block_size)
    return LLM(probe.model, kv_cache_memory_bytes=num_bytes, **options)


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
