"""From what was asked for to what is served: nothing stays "auto", and each decision is logged."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import torch

from tightkv.config import CacheConfig, EngineConfig
from tightkv.errors import ConfigError, ScaleError
from tightkv.formats import (
    KV_CACHE_DTYPES,
    KVCacheScales,
    LayerScales,
    TensorFormat,
    TensorScale,
    resolve_format,
)
from tightkv.formats.registry import takes_scales
from tightkv.kvcache import KVCacheSpec, LayerGroup
from tightkv.models import LayerGeometry, ModelGeometry
from tightkv.planning import MemoryPlan

__all__ = ["check_config", "log_plan", "resolve_config", "resolve_device", "resolve_specs"]

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
    if config.device.device not in ("auto", "cpu"):
        raise ConfigError(f"Unknown device {config.device.device!r}: choose auto or cpu.")
    for layer in cache.kv_cache_dtype_skip_layers:
        _layer_index(layer)
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


def resolve_device(name: str) -> torch.device:
    """The device to run on."""
    return torch.device("cpu" if name == "auto" else name)


def resolve_specs(
    cache: CacheConfig, geometry: ModelGeometry, model_dtype: torch.dtype
) -> tuple[KVCacheSpec, ...]:
    """Formats of K and V of every layer.

    Raises:
        ConfigError: for a skipped layer that the model does not have.
        ScaleError: for scales of layers that do not exist, or that their format cannot use.
    """
    scales: KVCacheScales = cache.kv_cache_scales or {}
    surplus = set(scales) - {layer.layer_idx for layer in geometry.layers}
    if surplus:
        raise ScaleError(
            f"There are scales for layers {sorted(surplus)}, which store no K and V in this model: "
            "they were made for another model."
        )
    skipped = _skipped_layers(cache, geometry)
    return tuple(
        _spec(cache, layer, model_dtype, scales, layer.layer_idx in skipped)
        for layer in geometry.layers
    )


def resolve_config(config: EngineConfig, plan: MemoryPlan, model_dtype: str) -> EngineConfig:
    """The configuration with every "auto" and None replaced by what was decided."""
    cache = config.cache
    return replace(
        config,
        model=replace(config.model, dtype=model_dtype, max_model_len=plan.max_model_len),
        cache=replace(
            cache,
            k_cache_dtype=_or_auto(_dtypes(cache)[0], model_dtype),
            v_cache_dtype=_or_auto(_dtypes(cache)[1], model_dtype),
            kv_cache_dtype=_or_auto(cache.kv_cache_dtype, model_dtype),
            kv_cache_memory_bytes=plan.pool_bytes,
        ),
        device=replace(config.device, device=resolve_device(config.device.device).type),
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
            _ranges(layers),
        )
    remarks = {f.remark() for spec in specs for f in (spec.k_format, spec.v_format)}
    for remark in sorted(remark for remark in remarks if remark):
        _logger.info(remark)
    windows = [str(group.sliding_window or "full") for group in groups]
    _logger.info("Layer groups by attention window: %s", ", ".join(windows))
    _logger.info("Kernel: %s", kernel)
    _logger.info(
        "%s KV cache size: %s tokens (%s bytes per token, %s bytes, %s blocks of %d tokens; %s)",
        device.type.upper(),
        f"{plan.num_tokens:,}",
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
    if cache.kv_cache_scales and not any(map(takes_scales, _dtypes(cache))):
        raise ScaleError(
            f"There are scales, but neither {' nor '.join(_dtypes(cache))} takes any: leave them "
            "out, or choose int8, fp8_e4m3 or fp8_e5m2."
        )
    default = CacheConfig().kv_cache_dtype
    if cache.kv_cache_dtype != default and cache.k_cache_dtype and cache.v_cache_dtype:
        raise ConfigError(
            f"kv_cache_dtype {cache.kv_cache_dtype!r} is contradicted by k_cache_dtype "
            f"{cache.k_cache_dtype!r} and v_cache_dtype {cache.v_cache_dtype!r}, which leave "
            "nothing for it: give either the first or the other two."
        )


def _skipped_layers(cache: CacheConfig, geometry: ModelGeometry) -> set[int]:
    known = [layer.layer_idx for layer in geometry.layers]
    num_layers = max([*known, *geometry.kv_sources]) + 1
    skipped = set()
    for given in cache.kv_cache_dtype_skip_layers:
        index = _layer_index(given)
        layer = index + num_layers if index < 0 else index
        if layer not in known:
            raise ConfigError(
                f"kv_cache_dtype_skip_layers has {index}, but the layers with a cache are "
                f"{_ranges(known)}: choose among them, or count from the end with -1."
            )
        skipped.add(layer)
    return skipped


def _layer_index(given: str) -> int:
    try:
        return int(given)
    except ValueError:
        raise ConfigError(
            f"kv_cache_dtype_skip_layers has {given!r}: give layer indices, as 0 1 -1."
        ) from None


def _spec(
    cache: CacheConfig,
    layer: LayerGeometry,
    model_dtype: torch.dtype,
    scales: KVCacheScales,
    is_skipped: bool,
) -> KVCacheSpec:
    of_layer = scales.get(layer.layer_idx, LayerScales())
    if is_skipped and (of_layer.k or of_layer.v):
        raise ScaleError(
            f"Layer {layer.layer_idx} is in kv_cache_dtype_skip_layers and has scales too: remove "
            "one of them."
        )
    k_dtype, v_dtype = ("auto", "auto") if is_skipped else _dtypes(cache)
    if scales and not is_skipped:
        for name, dtype, scale in (("K", k_dtype, of_layer.k), ("V", v_dtype, of_layer.v)):
            if takes_scales(dtype) and scale is None:
                raise ScaleError(
                    f"There are scales, but none for {name} of layer {layer.layer_idx}: add them, "
                    "or skip the layer."
                )

    def tensor_format(name: str, dtype: str, scale: TensorScale | None, size: int) -> TensorFormat:
        try:
            if scale is not None:
                scale.per_channel(layer.num_kv_heads, size)
            return resolve_format(dtype, model_dtype, scale)
        except ScaleError as error:
            raise ScaleError(f"{name} of layer {layer.layer_idx}: {error}") from error

    return KVCacheSpec(
        layer_idx=layer.layer_idx,
        block_size=cache.block_size,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        value_size=layer.value_size,
        k_format=tensor_format("K", k_dtype, of_layer.k, layer.head_size),
        v_format=tensor_format("V", v_dtype, of_layer.v, layer.value_size),
        sliding_window=layer.sliding_window,
    )


def _dtypes(cache: CacheConfig) -> tuple[str, str]:
    """What was asked for K and for V."""
    return cache.k_cache_dtype or cache.kv_cache_dtype, cache.v_cache_dtype or cache.kv_cache_dtype


def _or_auto(name: str, model_dtype: str) -> str:
    return model_dtype if name == CacheConfig().kv_cache_dtype else name


def _described(spec: KVCacheSpec) -> tuple[str, str]:
    return spec.k_format.describe(), spec.v_format.describe()


def _ranges(indices: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2, 5"."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
