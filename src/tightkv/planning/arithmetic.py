"""From bytes of memory to blocks, tokens, requests and an upper bound of the decode speed."""

from __future__ import annotations

from dataclasses import dataclass

from tightkv.config import CacheConfig
from tightkv.errors import InsufficientMemoryError
from tightkv.kvcache import KVCacheSpec, group_layers, layers_by_window
from tightkv.planning.capacity_plan import (
    Decode,
    FormatPlan,
    LayerKind,
    Needed,
    PlanSettings,
    Range,
)
from tightkv.planning.footprint import Footprint
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
    specs = rank_specs(choice.specs, size)
    pool = _pool(specs, model, settings, memory)
    at_max = pool.requests(settings.max_model_len)
    at_typical = pool.requests(settings.typical_len)
    fits = pool.is_enough and at_max >= (settings.concurrency or 0)
    values = sum(spec.num_kv_heads * (spec.head_size + spec.value_size) for spec in specs)
    kinds = _kinds(specs, choice.is_latent)
    used = sum(spec.block_bytes for spec in specs)
    bytes_per_token = pool.footprint.bytes_per_token
    return FormatPlan(
        name=choice.name,
        formats=_formats(specs, choice.is_latent),
        has_integers=any(
            not fmt.code.dtype.is_floating_point
            for spec in choice.specs
            for fmt in (spec.k_format, spec.v_format)
        ),
        effective_bits=8 * used / (values * settings.block_size),
        bytes_per_token=bytes_per_token,
        bytes_per_block=pool.bytes_per_block,
        padding=1 - used / settings.block_size / bytes_per_token,
        layers=kinds,
        num_blocks=pool.num_blocks,
        pool_bytes=pool.num_blocks * pool.bytes_per_block,
        num_tokens=_tokens(pool, settings, memory.pool),
        request_bytes=pool.footprint.most(settings.max_model_len),
        requests_at_max_len=at_max,
        requests_at_typical_len=at_typical,
        longest_context=pool.footprint.longest(
            pool.num_bytes, max(model.max_position, settings.max_model_len)
        ),
        decode=decode_bound(kinds, model, hardware, settings, int(at_typical)),
        needed=_needed(pool.footprint, settings, memory),
        fits=fits,
    )


@dataclass(frozen=True, slots=True)
class _Pool:
    """Room for requests.

    Attributes:
        bytes_per_block: of one block id in TightKV's pool; elsewhere of a block in all layers.
        num_bytes: room, of which blocks may leave a rest.
        is_enough: whether the longest request fits, beside all else.
    """

    footprint: Footprint
    bytes_per_block: int
    num_bytes: int
    is_enough: bool

    @property
    def num_blocks(self) -> int:
        return self.num_bytes // self.bytes_per_block

    def requests(self, num_tokens: int) -> float:
        return self.footprint.sequences(self.num_bytes, num_tokens)


def _pool(
    specs: tuple[KVCacheSpec, ...],
    model: ModelFacts,
    settings: PlanSettings,
    memory: DeviceMemory,
) -> _Pool:
    room = max(memory.pool.best, 0)
    if settings.engine != "tightkv":
        kinds = tuple(
            (window, sum(spec.block_bytes for spec in layers))
            for window, layers in layers_by_window(specs).items()
        )
        footprint = Footprint(kinds, settings.block_size)
        is_enough = footprint.most(settings.max_model_len) <= room
        return _Pool(footprint, sum(size for _, size in kinds), room, is_enough)
    groups = group_layers(specs)
    request = PoolRequest(
        max_model_len=settings.max_model_len if settings.is_length_given else None,
        max_position=model.max_position,
        max_num_seqs=settings.max_num_seqs,
        max_chunk=settings.max_num_batched_tokens,
        total_bytes=memory.total.best,
        weight_bytes=memory.weights.best,
        peak_bytes=memory.activations.best,
    )
    config = CacheConfig(
        block_size=settings.block_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
    )
    size = groups[0].page_bytes
    try:
        plan = plan_memory(groups, config, request)
    except InsufficientMemoryError:
        footprint = Footprint.of(groups, settings.block_size, request.max_chunk)
        return _Pool(footprint, size, room // size * size, is_enough=False)
    return _Pool(plan.footprint, size, plan.pool_bytes, is_enough=True)


def decode_bound(
    kinds: tuple[LayerKind, ...],
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
    kv_bytes = num_requests * _read_bytes(kinds, settings)
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


def _read_bytes(kinds: tuple[LayerKind, ...], settings: PlanSettings) -> float:
    """Bytes of K and V that one decoded token reads."""
    return sum(
        kind.bytes_per_token * min(settings.typical_len, kind.window or settings.typical_len)
        for kind in kinds
    )


def _needed(
    footprint: Footprint, settings: PlanSettings, memory: DeviceMemory
) -> tuple[Needed, ...]:
    if settings.concurrency is None:
        return ()
    needed = []
    for num_tokens in dict.fromkeys((settings.max_model_len, settings.typical_len)):
        pool = footprint.of_sequences(settings.concurrency, num_tokens)
        rest = memory.weights.best + memory.activations.best + memory.reserve.best
        device = int((pool + rest) / settings.gpu_memory_utilization)
        needed.append(Needed(num_tokens, pool, device))
    return tuple(needed)


def _tokens(pool: _Pool, settings: PlanSettings, room: Range) -> Range:
    """Tokens that fit in all layers, as if none left a window."""
    whole = sum(size for _, size in pool.footprint.groups)
    low, best, high = (
        max(num_bytes, 0) // whole * settings.block_size
        for num_bytes in (room.low, pool.num_bytes, room.high)
    )
    if settings.engine == "tightkv" or room.is_exact:
        return Range.exactly(best)
    return Range(low, best, high)


def _kinds(specs: tuple[KVCacheSpec, ...], is_latent: bool) -> tuple[LayerKind, ...]:
    return tuple(
        LayerKind(
            "latent" if is_latent else "window" if window else "full",
            window,
            len(layers),
            sum(spec.block_bytes / spec.block_size for spec in layers),
        )
        for window, layers in layers_by_window(specs).items()
    )


def _formats(specs: tuple[KVCacheSpec, ...], is_latent: bool) -> tuple[str, ...]:
    """Each combination of K and V that occurs, with the number of its layers."""
    layers: dict[str, int] = {}
    for spec in specs:
        k, v = spec.k_format.describe(), spec.v_format.describe()
        words = k if is_latent or k == v else f"K {k}, V {v}"
        layers[words] = layers.get(words, 0) + 1
    if len(layers) == 1:
        return tuple(layers)
    return tuple(f"{count} × {words}" for words, count in layers.items())
