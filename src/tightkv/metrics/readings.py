"""What /metrics reads from a snapshot of the engine when it is asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from tightkv.metrics.snapshot import EngineSnapshot, GroupSnapshot, LayerSnapshot, TensorSnapshot

__all__ = ["Reading", "read"]


class Reading(NamedTuple):
    """One value of a metric of the catalogue; `labels` are its own ones, in their order."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


def read(
    snapshot: EngineSnapshot, cache_config: Mapping[str, str], typical_tokens: int | None
) -> Iterator[Reading]:
    """The values of all metrics that are read at scrape.

    Args:
        snapshot: the engine, at most about a second ago.
        cache_config: labels of `vllm:cache_config_info`.
        typical_tokens: length of a typical request; None where none has finished.
    """
    usage = 1 - snapshot.num_free_blocks / snapshot.num_blocks
    typical = typical_tokens or snapshot.max_model_len
    stats = snapshot.stats
    yield Reading("vllm:num_requests_running", snapshot.num_running)
    yield Reading("vllm:num_requests_waiting", snapshot.num_waiting)
    yield Reading("vllm:prompt_tokens", stats.prompt_tokens)
    yield Reading("vllm:generation_tokens", stats.generation_tokens)
    yield Reading("vllm:kv_cache_usage_perc", usage)
    yield Reading("vllm:gpu_cache_usage_perc", usage)
    yield Reading("vllm:cache_config_info", 1, tuple(cache_config.values()))
    yield Reading("vllm:prefix_cache_queries", stats.prefix_cache_queries)
    yield Reading("vllm:prefix_cache_hits", stats.prefix_cache_hits)
    yield Reading("vllm:num_preemptions", stats.num_preemptions)
    yield Reading("tightkv:preempted_tokens", stats.num_preempted_tokens)
    yield Reading("tightkv:typical_request_tokens", typical)
    yield Reading("tightkv:requests_that_fit", int(snapshot.requests_that_fit(typical)))
    yield Reading("tightkv:memory_bytes", snapshot.weight_bytes, ("weights",))
    yield Reading("tightkv:memory_bytes", snapshot.peak_bytes, ("activations",))
    yield Reading("tightkv:memory_bytes", _pool_bytes(snapshot), ("kv_cache",))
    yield Reading("tightkv:kv_cache_bytes_per_token", snapshot.bytes_per_token)
    yield from _swap_space(snapshot)
    yield from _bytes_by_format(snapshot)
    yield from _effective_bits(snapshot)
    yield from _clip_ratios(snapshot)
    yield from _scale_sources(snapshot)


def _swap_space(snapshot: EngineSnapshot) -> Iterator[Reading]:
    swap, stats = snapshot.swap, snapshot.stats
    num_free = swap.num_slots - swap.num_used_slots - swap.num_kept_slots
    yield Reading("vllm:num_requests_swapped", swap.num_sequences)
    yield Reading("vllm:cpu_cache_usage_perc", swap.num_used_slots / max(1, swap.num_slots))
    holds = {"sequences": swap.num_used_slots, "prefixes": swap.num_kept_slots, "nothing": num_free}
    for what, count in holds.items():
        yield Reading("tightkv:swap_space_bytes", count * swap.slot_bytes, (what,))
    yield Reading("tightkv:swaps", stats.num_swaps)
    yield Reading("tightkv:swap_fallbacks", stats.num_swap_fallbacks)
    copies = {"out": stats.num_swapped_out_blocks, "in": stats.num_swapped_in_blocks}
    for way, count in copies.items():
        yield Reading(f"tightkv:swap_{way}_blocks", count)
        yield Reading(f"tightkv:swap_{way}_bytes", count * swap.slot_bytes)
    yield Reading("tightkv:swap_fetched_tokens", stats.num_fetched_tokens)


def _tensors(snapshot: EngineSnapshot) -> Iterator[tuple[LayerSnapshot, str, TensorSnapshot]]:
    for layer in snapshot.layers:
        yield layer, "k", layer.k
        yield layer, "v", layer.v


def _pool_bytes(snapshot: EngineSnapshot) -> int:
    return len(snapshot.pool.blocks) * snapshot.pool.block_bytes


def _bytes_by_format(snapshot: EngineSnapshot) -> Iterator[Reading]:
    """Of a pool that several groups share, each format has its share of a token's bytes."""
    of_token: dict[tuple[str, str], int] = defaultdict(int)
    used: dict[tuple[str, str], int] = defaultdict(int)
    for layer, name, tensor in _tensors(snapshot):
        labels = tensor.format, name
        of_token[labels] += tensor.block_bytes
        used[labels] += tensor.block_bytes * snapshot.groups[layer.group].num_used_blocks
    total = sum(of_token.values())
    for labels, value in of_token.items():
        allocated = _pool_bytes(snapshot) * value / total
        yield Reading("tightkv:kv_cache_allocated_bytes", allocated, labels)
        yield Reading("tightkv:kv_cache_used_bytes", used[labels], labels)


def _effective_bits(snapshot: EngineSnapshot) -> Iterator[Reading]:
    bits: dict[str, float] = defaultdict(float)
    values: dict[str, float] = defaultdict(float)
    for _, name, tensor in _tensors(snapshot):
        bits[name] += 8 * tensor.block_bytes
        values[name] += 8 * tensor.block_bytes / tensor.bits
    for name in bits:
        yield Reading("tightkv:kv_cache_effective_bits", bits[name] / values[name], (name,))


def _clip_ratios(snapshot: EngineSnapshot) -> Iterator[Reading]:
    largest: dict[tuple[str, str], float] = defaultdict(float)
    for layer, name, tensor in _tensors(snapshot):
        group = _group_name(snapshot.groups[layer.group])
        largest[group, name] = max(largest[group, name], tensor.clip_rate)
        labels = (str(layer.layer_idx), group, name)
        yield Reading("tightkv:kv_cache_layer_clip_ratio", tensor.clip_rate, labels)
    for (group, name), rate in largest.items():
        yield Reading("tightkv:kv_cache_clip_ratio", rate, (group, name))


def _scale_sources(snapshot: EngineSnapshot) -> Iterator[Reading]:
    """One value for each run of neighbouring layers with the same scales."""
    for name in ("k", "v"):
        tensors = [
            (layer.layer_idx, getattr(layer, name))
            for layer in sorted(snapshot.layers, key=lambda layer: layer.layer_idx)
        ]
        for scales, members in groupby(
            tensors, key=lambda member: (member[1].format, member[1].granularity, member[1].source)
        ):
            layers = [layer_idx for layer_idx, _ in members]
            span = str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
            yield Reading("tightkv:kv_cache_scale_source_info", 1, (span, name, *scales))


def _group_name(group: GroupSnapshot) -> str:
    return "full" if group.sliding_window is None else f"window_{group.sliding_window}"
