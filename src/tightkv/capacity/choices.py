"""From what was asked for the KV cache to what each layer stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from safetensors import SafetensorError

from tightkv.capacity.source import ModelSource
from tightkv.config import CacheConfig, EngineConfig
from tightkv.engine.arm_spec import parse_arms
from tightkv.engine.policy import PolicySources, dtypes_of, resolve_policy, skipped_layers
from tightkv.engine.resolve import check_config, resolve_specs
from tightkv.errors import CheckpointError, ConfigError
from tightkv.formats import LayerScales, ScalesFile, TensorScale, resolve_format
from tightkv.formats.registry import dtype_name, takes_scales
from tightkv.kvcache import KVCacheSpec
from tightkv.models import ModelGeometry, ModelIdentity, one_line
from tightkv.models.checkpoint import identify
from tightkv.models.checkpoint_scales import read_scales
from tightkv.planning import FormatChoice, LatentCache

__all__ = ["format_choices"]


def format_choices(
    entries: str | Sequence[str],
    source: ModelSource,
    geometry: ModelGeometry,
    dtype: torch.dtype,
    latent: LatentCache | None,
    cache: CacheConfig,
    static: bool,
) -> list[FormatChoice]:
    """What each entry makes each layer store.

    Args:
        entries: cache precisions as `parse_arms` reads them.
        source: the model.
        geometry: its layers.
        dtype: what "auto" stands for.
        latent: the latents to be stored instead of K and V, if they are.
        cache: the other settings of the cache.
        static: whether formats that take static scales have them, and no dynamic ones.

    Raises:
        ConfigError: for an entry that is not known, or that contradicts the other settings.
        ScaleError: for a scales file that does not fit the model.
    """
    choices = []
    for arm in parse_arms(entries, cache.kv_cache_dtype_skip_layers):
        settings = arm.cache_config(cache)
        check_config(EngineConfig(cache=settings))
        name = dtype_name(dtype) if arm.name == CacheConfig().kv_cache_dtype else arm.name
        if latent is not None:
            specs = _latent_specs(settings, latent, dtype, static)
        else:
            specs = _specs(settings, source, geometry, dtype, static)
        choices.append(FormatChoice(name, specs, is_latent=latent is not None))
    return choices


def _specs(
    cache: CacheConfig,
    source: ModelSource,
    geometry: ModelGeometry,
    dtype: torch.dtype,
    static: bool,
) -> tuple[KVCacheSpec, ...]:
    sources = _policy_sources(cache, source)
    if static and sources.file is None:
        cache = replace(cache, kv_cache_scales=_unit_scales(cache, geometry))
    policy = resolve_policy(cache, geometry, sources)
    return resolve_specs(policy, geometry, cache.block_size, dtype)


def _policy_sources(cache: CacheConfig, source: ModelSource) -> PolicySources:
    """The scales file, checked as far as is possible without weights; the checkpoint's scales."""
    sources = PolicySources.read(cache)
    has_weights = source.folder is not None and any(source.folder.glob("*.safetensors"))
    if sources.file is not None:
        sources.check_identity(_identity(source, sources, has_weights))
    if source.folder is None or not has_weights:
        return sources
    quantization = getattr(source.config, "quantization_config", None)  # not every config has it
    try:
        return replace(sources, checkpoint=read_scales(source.folder, quantization))
    except SafetensorError as error:
        raise CheckpointError(
            f"The weights in {source.folder} cannot be read as safetensors ({one_line(error)}): "
            "download them again."
        ) from error


def _identity(source: ModelSource, sources: PolicySources, has_weights: bool) -> ModelIdentity:
    if has_weights and source.folder is not None:
        return identify(source.config, source.folder)
    architectures = source.config.architectures or [source.config.model_type]
    weights = sources.file.model.weights if isinstance(sources.file, ScalesFile) else ""
    return ModelIdentity(architectures[0], source.config.model_type, weights)


def _unit_scales(cache: CacheConfig, geometry: ModelGeometry) -> dict[int, LayerScales] | None:
    """Stand-ins for calibrated scales: only that they are static changes the bytes."""
    unit = TensorScale(torch.ones(()))
    k, v = (unit if takes_scales(dtype) else None for dtype in dtypes_of(cache))
    if k is None and v is None:
        return None
    wide = skipped_layers(cache, geometry)
    layers = (layer.layer_idx for layer in geometry.layers)
    return {layer: LayerScales(k, v) for layer in layers if layer not in wide}


def _latent_specs(
    cache: CacheConfig, latent: LatentCache, dtype: torch.dtype, static: bool
) -> tuple[KVCacheSpec, ...]:
    """A latent is stored as K of one head, and V has no values of its own."""
    if cache.quantization_config_path or cache.kv_cache_dtype_skip_layers:
        raise ConfigError(
            "This model stores latents (MLA), which scales files and "
            "kv_cache_dtype_skip_layers do not know: give a KV cache dtype."
        )
    k_dtype, v_dtype = dtypes_of(cache)
    if k_dtype != v_dtype:
        raise ConfigError(
            f"This model stores one latent for K and V (MLA), but {k_dtype!r} and {v_dtype!r} "
            "were asked for: give one."
        )
    scale = TensorScale(torch.ones(())) if static and takes_scales(k_dtype) else None
    return tuple(
        KVCacheSpec(
            layer_idx=layer,
            block_size=cache.block_size,
            num_kv_heads=1,
            head_size=latent.size,
            value_size=0,
            k_format=resolve_format(k_dtype, dtype, scale),
            v_format=resolve_format(dtype_name(dtype), dtype),
        )
        for layer in range(latent.num_layers)
    )
