"""The state of an engine between two steps, as metrics and the page show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tightkv.metrics.stats import EngineStats

__all__ = [
    "EngineSnapshot",
    "GroupSnapshot",
    "LayerSnapshot",
    "PoolSnapshot",
    "RequestSnapshot",
    "SwapSnapshot",
    "TensorSnapshot",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSnapshot:
    """K or V of one layer.

    Attributes:
        format: the `kv_cache_dtype` that it is stored in.
        granularity: tensor, head, channel, two_factor, token_head, or none.
        source: where its scales come from.
        block_bytes: its bytes in a block of this layer, dynamic scales and padding included.
        bits: the same per value.
        clip_rate: share of the values that were clipped when written.
    """

    format: str
    granularity: str
    source: str
    block_bytes: int
    bits: float
    clip_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSnapshot:
    """One layer, and the index of its group in the snapshot's groups."""

    layer_idx: int
    group: int
    k: TensorSnapshot
    v: TensorSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """One layer group.

    Attributes:
        sliding_window: the group's window; None: full attention.
        num_used_blocks: that sequences use.
    """

    sliding_window: int | None
    num_used_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """The blocks, from which all layer groups take.

    Attributes:
        block_bytes: bytes of one block id.
        blocks: a letter per block: `.` free, `c` free but its content is remembered, `u` in use,
            `s` in use by several sequences.
    """

    block_bytes: int
    blocks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSnapshot:
    """One unfinished request.

    Attributes:
        status: waiting or running.
        num_blocks: blocks that its sequences hold.
    """

    request_id: str
    status: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_generation_tokens: int
    max_tokens: int
    num_cached_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapSnapshot:
    """The swap space; all 0 without one.

    Attributes:
        num_slots: blocks that it can hold.
        slot_bytes: bytes of each.
        num_used_slots: those that preempted sequences hold.
        num_kept_slots: those that hold what the prefix cache gave up.
        num_sequences: preempted sequences whose blocks it holds.
    """

    num_slots: int = 0
    slot_bytes: int = 0
    num_used_slots: int = 0
    num_kept_slots: int = 0
    num_sequences: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """All of it.

    Attributes:
        stats: counters since the start, a copy.
        num_running: sequences in the running batch.
        num_waiting: sequences that wait for room.
        block_size: tokens per block.
        num_blocks: blocks of the pool.
        num_free_blocks: blocks that it could still give.
        max_model_len: longest sequence that is served.
        weight_bytes: bytes of the weights.
        peak_bytes: bytes planned for a step's intermediate results.
        total_bytes: memory that was available before the weights were loaded.
        bytes_per_token: KV bytes of one token in all layers.
        requests_that_fit: how many more requests of so many tokens have room.
    """

    stats: EngineStats
    num_running: int
    num_waiting: int
    block_size: int
    num_blocks: int
    num_free_blocks: int
    max_model_len: int
    weight_bytes: int
    peak_bytes: int
    total_bytes: int | None
    bytes_per_token: float
    requests_that_fit: Callable[[int], float]
    layers: tuple[LayerSnapshot, ...]
    groups: tuple[GroupSnapshot, ...]
    pool: PoolSnapshot
    requests: tuple[RequestSnapshot, ...] = field(default=())
    swap: SwapSnapshot = field(default=SwapSnapshot())
