"""The JSON of `GET /state`, which the page draws once a second. It has no text of any prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypedDict

from tightkv.metrics import (
    EngineSnapshot,
    GroupSnapshot,
    LayerSnapshot,
    PoolSnapshot,
    RequestSnapshot,
    TensorSnapshot,
)
from tightkv.planning.footprint import tokens_in
from tightkv.server.history import History

__all__ = ["MAX_CELLS", "QualitySummary", "ServerFacts", "State", "build"]

MAX_CELLS = 1024
"""Most cells of a pool's map; what 200,000 blocks send once a second stays a few kilobytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What does not change while the server runs.

    Attributes:
        model: name under which the model is served.
        version: TightKV's.
        chat: whether the model has a chat template, so that /v1/chat/completions works.
        start_time: when the server was ready, in seconds of the clock that `build` gets.
    """

    model: str
    version: str
    chat: bool
    start_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySummary:
    """What the quality watch has found so far.

    Attributes:
        sample_rate: share of the finished requests that are scored again.
        num_requests: requests scored.
        num_tokens: tokens scored.
        mean_kl: mean KL divergence in nats from full precision; None without tokens.
        same_top: share of the tokens whose most probable token is the same; None without tokens.
    """

    sample_rate: float
    num_requests: int
    num_tokens: int
    mean_kl: float | None
    same_top: float | None


class ServerState(TypedDict):
    """Times are in seconds; `error` tells why the engine died, None while it lives."""

    model: str
    version: str
    chat: bool
    kv_format: str
    max_model_len: int
    uptime: float
    healthy: bool
    error: str | None


class MemoryState(TypedDict):
    """Bytes. `total` is what was available before the weights were loaded, None if unknown."""

    weights: int
    activations: int
    pool: int
    pool_in_use: int
    total: int | None
    per_token: float


class GroupState(TypedDict):
    """Layer groups with the same window; None: full attention."""

    sliding_window: int | None
    in_use: int


class PoolState(TypedDict):
    """The blocks, from which all layer groups take.

    `cells` are `[in use by one, shared, cached]` counts of `blocks_per_cell` blocks each (the last
    one may have fewer), in the order of the block ids; the rest of a cell is free.
    """

    block_bytes: int
    num_blocks: int
    in_use: int
    shared: int
    cached: int
    free: int
    blocks_per_cell: int
    cells: list[list[int]]


class RequestState(TypedDict):
    """One unfinished request. `age` is None where nobody knows when it came."""

    id: str
    status: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generation_tokens: int
    max_tokens: int
    blocks: int
    age: float | None


class HistoryState(TypedDict):
    """One entry per second, oldest first, all lists equally long; at most `seconds` entries.

    `ttft` has the median of each second, None where no request had its first token; `ttft_p50` is
    the median of all of them.
    """

    seconds: int
    prompt_tokens: list[int]
    generation_tokens: list[int]
    ttft: list[float | None]
    running: list[int]
    waiting: list[int]
    kv_usage: list[float]
    ttft_p50: float | None


class TensorState(TypedDict):
    """K or V of one layer. `clip_rate` is a share of the values, `bits` those of one value."""

    format: str
    granularity: str
    source: str
    bits: float
    clip_rate: float


class LayerState(TypedDict):
    """One layer."""

    layer: int
    k: TensorState
    v: TensorState


class SwapState(TypedDict):
    """The swap space: bytes, and blocks and sequences that were moved since the start.

    `in_use` are bytes of preempted sequences, `kept` those of what the prefix cache gave up.
    """

    total: int
    in_use: int
    kept: int
    block_bytes: int
    sequences: int
    blocks: int
    swaps: int
    fallbacks: int
    blocks_out: int
    blocks_in: int


class QualityState(TypedDict):
    """As `QualitySummary`."""

    sample_rate: float
    requests: int
    tokens: int
    mean_kl: float | None
    same_top: float | None


class State(TypedDict):
    """All of it.

    `tokens` and `free_tokens` have room in all layers, as if none had left a window.
    `prefix_hit_rate` is a share of all prompt tokens since the start, None before the first;
    `swap` is None without a swap space, `quality` while the quality watch is off.
    """

    server: ServerState
    memory: MemoryState
    block_size: int
    tokens: int
    free_tokens: int
    groups: list[GroupState]
    pool: PoolState
    num_running: int
    num_waiting: int
    swap: SwapState | None
    prefix_hit_rate: float | None
    requests: list[RequestState]
    history: HistoryState
    layers: list[LayerState]
    quality: QualityState | None


def build(
    facts: ServerFacts,
    snapshot: EngineSnapshot,
    history: History,
    *,
    now: float,
    arrival_times: Mapping[str, float],
    error: str | None = None,
    quality: QualitySummary | None = None,
) -> State:
    """What the page shows, ready for JSON.

    Args:
        facts: names and the like.
        snapshot: the engine, at most about a second ago.
        history: of the last minutes.
        now: the same clock as `facts.start_time` and `arrival_times`.
        arrival_times: by request id, when the server had read it.
        error: why the engine has died; None while it lives.
        quality: None while the quality watch is off.
    """
    pool = _pool(snapshot.pool)
    stats = snapshot.stats
    queries = stats.prefix_cache_queries
    groups, block_size = len(snapshot.groups), snapshot.block_size
    return {
        "server": {
            "model": facts.model,
            "version": facts.version,
            "chat": facts.chat,
            "kv_format": _in_words(snapshot.layers),
            "max_model_len": snapshot.max_model_len,
            "uptime": now - facts.start_time,
            "healthy": error is None,
            "error": error,
        },
        "memory": _memory(snapshot, pool),
        "block_size": snapshot.block_size,
        "tokens": tokens_in(snapshot.num_blocks, groups, block_size),
        "free_tokens": tokens_in(snapshot.num_free_blocks, groups, block_size),
        "groups": _groups(snapshot.groups),
        "pool": pool,
        "num_running": snapshot.num_running,
        "num_waiting": snapshot.num_waiting,
        "swap": _swap(snapshot) if snapshot.swap.num_slots else None,
        "prefix_hit_rate": stats.prefix_cache_hits / queries if queries else None,
        "requests": [_request(request, now, arrival_times) for request in snapshot.requests],
        "history": _history(history),
        "layers": [_layer(layer) for layer in snapshot.layers],
        "quality": None if quality is None else _quality(quality),
    }


def _in_words(layers: Sequence[LayerSnapshot]) -> str:
    """The KV formats, the most frequent first: "int8 (…) in 28 of 30 layers; bfloat16 (…) in 2"."""
    counts: dict[str, int] = {}
    for layer in layers:
        k, v = _tensor_in_words(layer.k), _tensor_in_words(layer.v)
        pair = k if k == v else f"K {k}, V {v}"
        counts[pair] = counts.get(pair, 0) + 1
    (first, count), *others = sorted(counts.items(), key=lambda item: -item[1])
    if not others:
        return first
    return "; ".join(
        [f"{first} in {count} of {len(layers)} layers"] + [f"{pair} in {n}" for pair, n in others]
    )


_GRANULARITY_IN_WORDS = {
    "none": "",
    "tensor": ", one scale per tensor",
    "head": ", one scale per head",
    "channel": ", one scale per channel",
    "two_factor": ", two-factor scales",
    "token_head": ", one scale per token and head",
}


def _tensor_in_words(tensor: TensorSnapshot) -> str:
    scales = _GRANULARITY_IN_WORDS.get(tensor.granularity, f", {tensor.granularity}")
    return f"{tensor.format} ({tensor.bits:.4g} bits{scales})"


def _memory(snapshot: EngineSnapshot, pool: PoolState) -> MemoryState:
    return {
        "weights": snapshot.weight_bytes,
        "activations": snapshot.peak_bytes,
        "pool": pool["num_blocks"] * pool["block_bytes"],
        "pool_in_use": (pool["in_use"] + pool["shared"]) * pool["block_bytes"],
        "total": snapshot.total_bytes,
        "per_token": snapshot.bytes_per_token,
    }


def _groups(groups: Sequence[GroupSnapshot]) -> list[GroupState]:
    in_use: dict[int | None, int] = {}
    for group in groups:
        in_use[group.sliding_window] = in_use.get(group.sliding_window, 0) + group.num_used_blocks
    return [{"sliding_window": window, "in_use": count} for window, count in in_use.items()]


def _pool(pool: PoolSnapshot) -> PoolState:
    blocks = pool.blocks
    size = max(1, -(-len(blocks) // MAX_CELLS))
    cells = [
        [blocks.count(letter, start, start + size) for letter in "usc"]
        for start in range(0, len(blocks), size)
    ]
    in_use, shared, cached = (
        (sum(counts) for counts in zip(*cells, strict=True)) if cells else (0, 0, 0)
    )
    return {
        "block_bytes": pool.block_bytes,
        "num_blocks": len(blocks),
        "in_use": in_use,
        "shared": shared,
        "cached": cached,
        "free": len(blocks) - in_use - shared - cached,
        "blocks_per_cell": size,
        "cells": cells,
    }


def _swap(snapshot: EngineSnapshot) -> SwapState:
    swap, stats = snapshot.swap, snapshot.stats
    return {
        "total": swap.num_slots * swap.slot_bytes,
        "in_use": swap.num_used_slots * swap.slot_bytes,
        "kept": swap.num_kept_slots * swap.slot_bytes,
        "block_bytes": swap.slot_bytes,
        "sequences": swap.num_sequences,
        "blocks": swap.num_used_slots,
        "swaps": stats.num_swaps,
        "fallbacks": stats.num_swap_fallbacks,
        "blocks_out": stats.num_swapped_out_blocks,
        "blocks_in": stats.num_swapped_in_blocks,
    }


def _request(
    request: RequestSnapshot, now: float, arrival_times: Mapping[str, float]
) -> RequestState:
    arrival_time = arrival_times.get(request.request_id)
    return {
        "id": request.request_id,
        "status": request.status,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "computed_tokens": request.num_computed_tokens,
        "generation_tokens": request.num_generation_tokens,
        "max_tokens": request.max_tokens,
        "blocks": request.num_blocks,
        "age": None if arrival_time is None else now - arrival_time,
    }


def _history(history: History) -> HistoryState:
    samples = history.samples()
    ttfts = [ttft for sample in samples for ttft in sample.ttfts]
    return {
        "seconds": history.seconds,
        "prompt_tokens": [sample.prompt_tokens for sample in samples],
        "generation_tokens": [sample.generation_tokens for sample in samples],
        "ttft": [sample.ttft for sample in samples],
        "running": [sample.num_running for sample in samples],
        "waiting": [sample.num_waiting for sample in samples],
        "kv_usage": [sample.kv_usage for sample in samples],
        "ttft_p50": median(ttfts) if ttfts else None,
    }


def _tensor(tensor: TensorSnapshot) -> TensorState:
    return {
        "format": tensor.format,
        "granularity": tensor.granularity,
        "source": tensor.source,
        "bits": tensor.bits,
        "clip_rate": tensor.clip_rate,
    }


def _layer(layer: LayerSnapshot) -> LayerState:
    return {
        "layer": layer.layer_idx,
        "k": _tensor(layer.k),
        "v": _tensor(layer.v),
    }


def _quality(quality: QualitySummary) -> QualityState:
    return {
        "sample_rate": quality.sample_rate,
        "requests": quality.num_requests,
        "tokens": quality.num_tokens,
        "mean_kl": quality.mean_kl,
        "same_top": quality.same_top,
    }
