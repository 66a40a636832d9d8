"""What one of several devices holds under tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tightkv.errors import ConfigError
from tightkv.kvcache import KVCacheSpec
from tightkv.planning.model_facts import ModelFacts, Parameter

__all__ = ["check_heads", "rank_kv_heads", "rank_share", "rank_specs"]

# Every device has them whole: routers, and the projections into a latent.
_REPLICATED = (".gate.weight", ".router.weight", "_a_proj.weight", "kv_a_proj_with_mqa.weight")
_KEYS_AND_VALUES = (".k_proj.weight", ".v_proj.weight")
_JOINED = (".qkv_proj.weight", ".query_key_value.weight", ".c_attn.weight")


def check_heads(num_heads: Iterable[int], tensor_parallel_size: int) -> None:
    """Refuse a number of devices that the query heads cannot be shared among.

    Raises:
        ConfigError: with the numbers that can.
    """
    if tensor_parallel_size < 1:
        raise ConfigError(f"tensor_parallel_size is {tensor_parallel_size}: it must be at least 1.")
    for heads in sorted(set(num_heads)):
        if heads % tensor_parallel_size:
            fitting = [str(size) for size in range(1, heads + 1) if heads % size == 0]
            raise ConfigError(
                f"tensor_parallel_size is {tensor_parallel_size}, which does not divide the "
                f"model's {heads} attention heads: choose one of {', '.join(fitting)}."
            )


def rank_kv_heads(num_kv_heads: int, tensor_parallel_size: int) -> int:
    """KV heads on one device: at least one, so more devices than KV heads hold copies."""
    return max(1, -(-num_kv_heads // tensor_parallel_size))


def rank_specs(specs: Iterable[KVCacheSpec], tensor_parallel_size: int) -> tuple[KVCacheSpec, ...]:
    """What each layer stores on one device."""
    return tuple(
        replace(spec, num_kv_heads=rank_kv_heads(spec.num_kv_heads, tensor_parallel_size))
        for spec in specs
    )


def rank_share(model: ModelFacts, tensor_parallel_size: int, experts: bool | None = None) -> float:
    """Share of the weights on one device; `experts` picks those of experts, or the others."""
    total = model.num_parameters
    held = sum(
        parameter.size * _held(parameter, model, tensor_parallel_size)
        for parameter in model.parameters
        if experts in (None, parameter.is_expert)
    )
    return held / total


def _held(parameter: Parameter, model: ModelFacts, size: int) -> float:
    """Share of one weight that a device holds: 1 if it has all of it."""
    if len(parameter.shape) < 2 or parameter.name.endswith(_REPLICATED):
        return 1.0
    copies = rank_kv_heads(model.num_kv_heads, size) / model.num_kv_heads
    if parameter.name.endswith(_KEYS_AND_VALUES):
        return copies
    if parameter.name.endswith(_JOINED):
        kv_rows = 2 * model.num_kv_heads
        return (model.num_heads / size + kv_rows * copies) / (model.num_heads + kv_rows)
    return 1.0 / size
