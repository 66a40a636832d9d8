"""From what was asked for to what is served: nothing stays "auto", and each decision is logged."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from tightkv.config import PREEMPTION_MODES, CacheConfig, EngineConfig, SchedulerConfig
from tightkv.engine.devices import resolve_device
from tightkv.engine.policy import check_skip_layers, layer_ranges
from tightkv.errors import ConfigError, ScaleError
from tightkv.formats import (
    KV_CACHE_DTYPES,
    KVCachePolicy,
    LayerPolicy,
    TensorFormat,
    TensorPolicy,
    resolve_format,
)
from tightkv.kvcache import KVCacheSpec, LayerGroup, group_layers
from tightkv.kvcache.swap_space import check_size
from tightkv.models import LayerGeometry, ModelGeometry
from tightkv.planning import MemoryPlan

__all__ = [
    "check_config",
    "check_swap_size",
    "layer_spec",
    "log_plan",
    "quiet_log",
    "resolve_config",
    "resolve_specs",
]

_logger = logging.getLogger("tightkv")


def check_config(config: EngineConfig) -> None:
    """Refuse what cannot be served whatever the model, before it is loaded.

    Raises:
        ConfigError: names the settings and what to do.
    """
    cache, scheduler = config.cache, config.scheduler
    _check_dtypes(cache)
    if cache.block_size < 16 or cache.block_size % 16:
        raise ConfigError(f"block_size is {cache.block_size}: it must be a multiple of 16.")
    if not 0 < cache.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is {cache.gpu_memory_utilization}: it must be above 0 and at "
            "most 1."
        )
    resolve_device(config.device)
    if config.device.tensor_parallel_size != 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.device.tensor_parallel_size}: one process serves on "
            "one device; leave it at 1."
        )
    _check_swap(cache, scheduler)
    if scheduler.scheduling_policy not in ("fcfs", "priority"):
        raise ConfigError(
            f"Unknown scheduling_policy {scheduler.scheduling_policy!r}: choose fcfs or priority."
        )
    check_skip_layers(cache)
    positive = {
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "max_model_len": config.model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
    }
    for name, value in positive.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} is {value!r}: it must be a whole number, at least 1.")
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({scheduler.max_num_batched_tokens}) is below max_num_seqs "
            f"({scheduler.max_num_seqs}): a step could not hold one token of each sequence; raise "
            "the first or lower the second."
        )


def check_swap_size(
    num_bytes: int, policy: KVCachePolicy, geometry: ModelGeometry, block_size: int
) -> None:
    """Refuse a swap space for less than a block, before the model's data type is known.

    Raises:
        ConfigError: says how much a block needs at least.
    """
    # "auto" has two bytes a value, or four; the swap space looks again when it is made.
    specs = resolve_specs(policy, geometry, block_size, torch.bfloat16)
    check_size(num_bytes, group_layers(specs)[0].page_bytes)


def resolve_specs(
    policy: KVCachePolicy, geometry: ModelGeometry, block_size: int, model_dtype: torch.dtype
) -> tuple[KVCacheSpec, ...]:
    """What every layer stores.

    Raises:
        ScaleError: for scales that their format cannot use.
    """
    return tuple(
        layer_spec(layer, policy[layer.layer_idx], block_size, model_dtype)
        for layer in geometry.layers
    )


def resolve_config(
    config: EngineConfig, plan: MemoryPlan, policy: KVCachePolicy, model_dtype: str
) -> EngineConfig:
    """The configuration with every "auto" and None replaced by what was decided."""
    k_dtype = _of_most_layers((of.k for of in policy.values()), model_dtype)
    v_dtype = _of_most_layers((of.v for of in policy.values()), model_dtype)
    cache = replace(
        config.cache,
        k_cache_dtype=k_dtype,
        v_cache_dtype=v_dtype,
        kv_cache_dtype=k_dtype,
        kv_cache_memory_bytes=plan.pool_bytes,
    )
    return replace(
        config,
        model=replace(config.model, dtype=model_dtype, max_model_len=plan.max_model_len),
        cache=cache,
        device=replace(config.device, device=resolve_device(config.device).type),
    )


def log_plan(
    device: torch.device, plan: MemoryPlan, groups: tuple[LayerGroup, ...], kernel: str
) -> None:
    """Say what will be served, in the words of vLLM's log where it has them."""
    specs = [spec for group in groups for spec in group.specs]
    formats = Counter((spec.k_format.describe(), spec.v_format.describe()) for spec in specs)
    for (k_format, v_format), count in formats.items():
        layers = [s.layer_idx for s in specs if _described(s) == (k_format, v_format)]
        _logger.info(
            "KV cache format of %d of %d layers: K %s, V %s (layers %s)",
            count,
            len(specs),
            k_format,
            v_format,
            layer_ranges(layers),
        )
    remarks = {f.remark() for spec in specs for f in (spec.k_format, spec.v_format)}
    for remark in sorted(remark for remark in remarks if remark):
        _logger.info(remark)
    windows = Counter(str(group.sliding_window or "full") for group in groups)
    _logger.info(
        "Layer groups by attention window: %s",
        ", ".join(f"{count} × {name}" if count > 1 else name for name, count in windows.items()),
    )
    any_window = any(group.sliding_window for group in groups)
    if any_window:
        _logger.info("Layers with a window hold its tokens only, so that sequences may be longer")
    _logger.info("Kernel: %s", kernel)
    _logger.info(
        "%s KV cache size: %s (%s bytes per token, %s bytes, %s blocks of %d tokens; %s)",
        device.type.upper(),
        f"{plan.num_tokens:,} tokens" + (" in all layers" if any_window else ""),
        f"{plan.bytes_per_token:,.0f}",
        f"{plan.pool_bytes:,}",
        f"{plan.num_blocks:,}",
        plan.block_size,
        plan.reason,
    )
    _logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{plan.max_model_len:,}",
        plan.max_concurrency(plan.max_model_len),
    )


@contextmanager
def quiet_log() -> Iterator[None]:
    """Leave out what an engine tells while it is made; there are several, or it is not the one."""
    level = _logger.level
    _logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        _logger.setLevel(level)


def _check_dtypes(cache: CacheConfig) -> None:
    given = {
        "kv_cache_dtype": cache.kv_cache_dtype,
        "k_cache_dtype": cache.k_cache_dtype,
        "v_cache_dtype": cache.v_cache_dtype,
    }
    for name, value in given.items():
        if value is not None and value not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"Unknown {name} {value!r}: choose one of {', '.join(KV_CACHE_DTYPES)}."
            )
    default = CacheConfig().kv_cache_dtype
    if cache.kv_cache_dtype != default and cache.k_cache_dtype and cache.v_cache_dtype:
        raise ConfigError(
            f"kv_cache_dtype {cache.kv_cache_dtype!r} is contradicted by k_cache_dtype "
            f"{cache.k_cache_dtype!r} and v_cache_dtype {cache.v_cache_dtype!r}, which leave "
            "nothing for it: give either the first or the other two."
        )


def _check_swap(cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    size, mode = cache.swap_space, scheduler.preemption_mode
    if not isinstance(size, int | float) or not 0 <= size < math.inf:
        raise ConfigError(f"swap_space is {size!r}: it must be a number of GiB, at least 0.")
    if mode not in PREEMPTION_MODES:
        raise ConfigError(
            f"Unknown preemption_mode {mode!r}: choose one of {', '.join(PREEMPTION_MODES)}."
        )
    if size == 0 and mode == "swap":
        raise ConfigError(
            "preemption_mode is 'swap', but swap_space is 0: give it some GiB, or choose another "
            "mode."
        )
    if size == 0 and cache.swap_dir is not None:
        raise ConfigError(
            f"swap_dir is {cache.swap_dir!r}, but swap_space is 0: give it some GiB, or leave the "
            "folder out."
        )


def layer_spec(
    layer: LayerGeometry, policy: LayerPolicy, block_size: int, model_dtype: torch.dtype
) -> KVCacheSpec:
    """What one layer stores; errors as in `resolve_specs`."""

    def tensor_format(name: str, tensor: TensorPolicy) -> TensorFormat:
        try:
            return resolve_format(tensor.kv_cache_dtype, model_dtype, tensor.scale)
        except ScaleError as error:
            raise ScaleError(f"{name} of layer {layer.layer_idx}: {error}") from error

    return KVCacheSpec(
        layer_idx=layer.layer_idx,
        block_size=block_size,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        value_size=layer.value_size,
        k_format=tensor_format("K", policy.k),
        v_format=tensor_format("V", policy.v),
        sliding_window=layer.sliding_window,
    )


def _of_most_layers(tensors: Iterable[TensorPolicy], model_dtype: str) -> str:
    names = Counter(tensor.kv_cache_dtype for tensor in tensors)
    name = names.most_common(1)[0][0]
    return model_dtype if name == CacheConfig().kv_cache_dtype else name


def _described(spec: KVCacheSpec) -> tuple[str, str]:
    return spec.k_format.describe(), spec.v_format.describe()
