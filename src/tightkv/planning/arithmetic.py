"""From bytes of memory to blocks, tokens, requests and an upper bound of the decode speed."""

from __future__ import annotations

from dataclasses import dataclass

from tightkv.config import CacheConfig
from tightkv.errors import InsufficientMemoryError
from tightkv.kvcache import KVCacheSpec, LayerGroup, group_layers
from tightkv.planning.capacity_plan import (
    Decode,
    FormatPlan,
    LayerKind,
    Needed,
    PlanSettings,
    Range,
)
from tightkv.planning.hardware import Hardware
from tightkv.planning.memory import PoolRequest, plan_memory
from tightkv.planning.model_facts import ModelFacts
from tightkv.planning.sharding import rank_share, rank_specs

__all__ = ["DeviceMemory", "FormatChoice", "plan_format"]


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """What each layer stores, before it is shared among devices.

    Attributes:
        name: as it was asked for.
        is_latent: whether the specs are those of latents, not of K and V.
    """

    name: str
    specs: tuple[KVCacheSpec, ...]
    is_latent: bool = False


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Terms of the waterfall, in bytes of one device."""

    total: Range
    weights: Range
    activations: Range
    reserve: Range
    pool: Range


def plan_format(
    choice: FormatChoice,
    model: ModelFacts,
    hardware: Hardware,
    settings: PlanSettings,
    memory: DeviceMemory,
) -> FormatPlan:
    """Capacity with one choice of formats."""
    size = settings.tensor_parallel_size
    groups = group_layers(rank_specs(choice.specs, size))
    cache = _Cache(groups, settings, keeps_whole=settings.engine == "tightkv")
    block_bytes = sum(group.block_bytes for group in groups)
    num_blocks, fits = _blocks(cache, block_bytes, model, settings, memory)
    pool = num_blocks * block_bytes if cache.keeps_whole else max(memory.pool.best, 0)
    at_max = cache.requests(pool, settings.max_model_len)
    at_typical = cache.requests(pool, settings.typical_len)
    if settings.concurrency is not None:
        fits = fits and at_max >= settings.concurrency
    bits = sum(_values(spec) for group in groups for spec in group.specs)
    return FormatPlan(
        name=choice.name,
        formats=_formats(groups, choice.is_latent),
        has_integers=any(
            not fmt.code.dtype.is_floating_point
            for spec in choice.specs
            for fmt in (spec.k_format, spec.v_format)
        ),
        effective_bits=8 * block_bytes / (bits * settings.block_size),
        bytes_per_token=block_bytes / settings.block_size,
        bytes_per_block=block_bytes,
        layers=_kinds(groups, settings.block_size, choice.is_latent),
        num_blocks=num_blocks,
        pool_bytes=num_blocks * block_bytes,
        num_tokens=_tokens(num_blocks, block_bytes, settings, memory.pool),
        request_bytes=cache.request_bytes(settings.max_model_len),
        requests_at_max_len=at_max,
        requests_at_typical_len=at_typical,
        longest_context=cache.longest(pool, max(model.max_position, settings.max_model_len)),
        decode=decode_bound(groups, model, hardware, settings, int(at_typical)),
        needed=_needed(cache, settings, memory),
        fits=fits,
    )


@dataclass(frozen=True, slots=True)
class _Cache:
    """How many bytes requests take.

    Attributes:
        keeps_whole: whether layers with a window keep all tokens, as in TightKV; other engines
            free the blocks that have left the window.
    """

    groups: tuple[LayerGroup, ...]
    settings: PlanSettings
    keeps_whole: bool

    def request_bytes(self, num_tokens: int) -> int:
        """Bytes of one request, in whole blocks."""
        return sum(
            group.block_bytes * self._blocks(group.sliding_window, num_tokens)
            for group in self.groups
        )

    def requests(self, pool_bytes: int, num_tokens: int) -> float:
        return pool_bytes / self.request_bytes(num_tokens)

    def longest(self, pool_bytes: int, most: int) -> int:
        """Tokens of the longest request that a pool holds, `most` at most."""
        block_size = self.settings.block_size
        low, high = 0, -(-most // block_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_bytes(middle * block_size) <= pool_bytes:
                low = middle
            else:
                high = middle - 1
        return min(low * block_size, most)

    def _blocks(self, window: int | None, num_tokens: int) -> int:
        block_size = self.settings.block_size
        blocks = -(-num_tokens // block_size)
        if window is None or self.keeps_whole:
            return blocks
        # The window can begin in the middle of a block.
        return min(blocks, -(-window // block_size) + 1)


def _blocks(
    cache: _Cache,
    block_bytes: int,
    model: ModelFacts,
    settings: PlanSettings,
    memory: DeviceMemory,
) -> tuple[int, bool]:
    """Blocks of the pool, and whether one request of `max_model_len` tokens fits."""
    if settings.engine != "tightkv":
        pool = max(memory.pool.best, 0)
        return pool // block_bytes, cache.request_bytes(settings.max_model_len) <= pool
    request = PoolRequest(
        max_model_len=settings.max_model_len if settings.is_length_given else None,
        max_position=model.max_position,
        max_num_seqs=settings.max_num_seqs,
        total_bytes=memory.total.best,
        weight_bytes=memory.weights.best,
        peak_bytes=memory.activations.best,
    )
    config = CacheConfig(
        block_size=settings.block_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
    )
    try:
        return plan_memory(cache.groups, config, request).num_blocks, True
    except InsufficientMemoryError:
        return max(memory.pool.best, 0) // block_bytes, False


def decode_bound(
    groups: tuple[LayerGroup, ...],
    model: ModelFacts,
    hardware: Hardware,
    settings: PlanSettings,
    num_requests: int,
) -> Decode | None:
    """Roofline of decode: a step reads the weights once, and K and V of every request.

    Tokens per second are at most `requests / max(bytes / bandwidth, operations / flops)`, with 2
    operations per weight and token (Williams, Waterman and Patterson, 2009: Roofline).
    """
    num_requests = min(num_requests, settings.max_num_seqs)
    if hardware.bandwidth is None or num_requests < 1:
        return None
    size = settings.tensor_parallel_size
    weights = model.weight_bytes[1]
    dense = rank_share(model, size, experts=False)
    experts = rank_share(model, size, experts=True)
    weight_bytes = weights * (dense + experts * model.touched_experts(num_requests))
    kv_bytes = num_requests * _read_bytes(groups, settings)
    active = dense + experts * model.experts_per_token / model.num_experts
    operations = 2.0 * num_requests * model.num_parameters * active
    memory_time = (weight_bytes + kv_bytes) / hardware.bandwidth
    compute_time = operations / hardware.flops if hardware.flops else 0.0
    return Decode(
        num_requests=num_requests,
        tokens_per_second=num_requests / max(memory_time, compute_time),
        bound="memory" if memory_time >= compute_time else "compute",
        kv_share=kv_bytes / (weight_bytes + kv_bytes),
    )


def _read_bytes(groups: tuple[LayerGroup, ...], settings: PlanSettings) -> float:
    """Bytes of K and V that one decoded token reads."""
    return sum(
        group.block_bytes
        / settings.block_size
        * min(settings.typical_len, group.sliding_window or settings.typical_len)
        for group in groups
    )


def _needed(cache: _Cache, settings: PlanSettings, memory: DeviceMemory) -> tuple[Needed, ...]:
    if settings.concurrency is None:
        return ()
    needed = []
    for num_tokens in (settings.max_model_len, settings.typical_len):
        pool = settings.concurrency * cache.request_bytes(num_tokens)
        rest = memory.weights.best + memory.activations.best + memory.reserve.best
        device = int((pool + rest) / settings.gpu_memory_utilization)
        needed.append(Needed(num_tokens, pool, device))
    return tuple(needed)


def _tokens(num_blocks: int, block_bytes: int, settings: PlanSettings, pool: Range) -> Range:
    best = num_blocks * settings.block_size
    if settings.engine == "tightkv" or pool.is_exact:
        return Range.exactly(best)
    low, high = (
        max(bound, 0) // block_bytes * settings.block_size for bound in (pool.low, pool.high)
    )
    return Range(low, best, high)


def _kinds(
    groups: tuple[LayerGroup, ...], block_size: int, is_latent: bool
) -> tuple[LayerKind, ...]:
    return tuple(
        LayerKind(
            "latent" if is_latent else "window" if group.sliding_window else "full",
            group.sliding_window,
            len(group.specs),
            group.block_bytes / block_size,
        )
        for group in groups
    )


def _formats(groups: tuple[LayerGroup, ...], is_latent: bool) -> tuple[str, ...]:
    """Each combination of K and V that occurs, with the number of its layers."""
    layers: dict[str, int] = {}
    for spec in (spec for group in groups for spec in group.specs):
        k, v = spec.k_format.describe(), spec.v_format.describe()
        words = k if is_latent or k == v else f"K {k}, V {v}"
        layers[words] = layers.get(words, 0) + 1
    if len(layers) == 1:
        return tuple(layers)
    return tuple(f"{count} × {words}" for words, count in layers.items())


def _values(spec: KVCacheSpec) -> int:
    return spec.num_kv_heads * (spec.head_size + spec.value_size)
