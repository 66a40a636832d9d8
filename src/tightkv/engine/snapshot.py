"""What metrics and the page show of an engine, read between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.request import Request
from tightkv.engine.sequence import SequenceStatus
from tightkv.formats import TensorFormat, TensorPolicy
from tightkv.kvcache import KVCacheManager, SwappingKVCacheManager
from tightkv.metrics import (
    EngineSnapshot,
    GroupSnapshot,
    LayerSnapshot,
    PoolSnapshot,
    RequestSnapshot,
    SwapSnapshot,
    TensorSnapshot,
)

__all__ = ["take_snapshot"]


def take_snapshot(engine: LLMEngine) -> EngineSnapshot:
    """The engine as it is now; call it in the thread that steps the engine."""
    manager, plan = engine.manager, engine.plan
    rates = engine.storage.clip_rates()
    groups = zip(engine.storage.groups, manager.num_used_blocks(), strict=True)
    return EngineSnapshot(
        stats=replace(engine.stats, clip_rates=rates),
        num_running=len(engine.scheduler.running),
        num_waiting=len(engine.scheduler.waiting),
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        num_free_blocks=manager.num_free_blocks,
        max_model_len=plan.max_model_len,
        weight_bytes=engine.pool_request.weight_bytes,
        peak_bytes=engine.pool_request.peak_bytes,
        total_bytes=engine.pool_request.total_bytes,
        bytes_per_token=plan.bytes_per_token,
        requests_that_fit=partial(
            plan.footprint.sequences, manager.num_free_blocks * plan.bytes_per_block
        ),
        layers=tuple(sorted(_layers(engine, rates), key=lambda layer: layer.layer_idx)),
        groups=tuple(
            GroupSnapshot(sliding_window=group.sliding_window, num_used_blocks=num_used)
            for group, num_used in groups
        ),
        pool=PoolSnapshot(block_bytes=plan.bytes_per_block, blocks=manager.block_letters()),
        requests=tuple(_request(request, manager) for request in engine.requests),
        swap=_swap(manager),
    )


def _swap(manager: KVCacheManager) -> SwapSnapshot:
    if not isinstance(manager, SwappingKVCacheManager):
        return SwapSnapshot()
    space = manager.swap_space
    return SwapSnapshot(
        num_slots=space.num_slots,
        slot_bytes=space.slot_bytes,
        num_used_slots=space.num_used_slots,
        num_kept_slots=space.num_kept_slots,
        num_sequences=manager.num_swapped,
    )


def _layers(engine: LLMEngine, rates: Mapping[int, tuple[float, float]]) -> Iterator[LayerSnapshot]:
    for index, group in enumerate(engine.storage.groups):
        for spec in group.specs:
            layout, policy = spec.layout, engine.policy[spec.layer_idx]
            k_rate, v_rate = rates[spec.layer_idx]
            values = spec.block_size * spec.num_kv_heads
            yield LayerSnapshot(
                layer_idx=spec.layer_idx,
                group=index,
                k=_tensor(spec.k_format, policy.k, layout.k_bytes, values * spec.head_size, k_rate),
                v=_tensor(
                    spec.v_format, policy.v, layout.v_bytes, values * spec.value_size, v_rate
                ),
            )


def _tensor(
    tensor_format: TensorFormat,
    policy: TensorPolicy,
    block_bytes: int,
    num_values: int,
    clip_rate: float,
) -> TensorSnapshot:
    return TensorSnapshot(
        format=tensor_format.name,
        granularity=tensor_format.granularity,
        source=policy.source or "none",
        block_bytes=block_bytes,
        bits=8 * block_bytes / num_values,
        clip_rate=clip_rate,
    )


def _request(request: Request, manager: KVCacheManager) -> RequestSnapshot:
    sequences = request.sequences
    is_running = any(sequence.status is SequenceStatus.RUNNING for sequence in sequences)
    return RequestSnapshot(
        request_id=request.request_id,
        status="running" if is_running else "waiting",
        num_prompt_tokens=len(request.prompt_token_ids),
        num_computed_tokens=sum(sequence.num_computed_tokens for sequence in sequences),
        num_generation_tokens=sum(sequence.num_output_tokens for sequence in sequences),
        max_tokens=sum(sequence.max_tokens for sequence in sequences),
        num_cached_tokens=sequences[0].num_cached_tokens or 0,
        num_blocks=sum(manager.num_blocks_of(sequence.seq_id) for sequence in sequences),
    )
