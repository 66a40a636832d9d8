"""Bytes of a pool of so many tokens, before there is an engine."""

from __future__ import annotations

from dataclasses import replace

from tightkv.config import EngineConfig
from tightkv.engine.policy import PolicySources, resolve_policy
from tightkv.engine.resolve import resolve_specs
from tightkv.kvcache import group_layers
from tightkv.models import LoadedModel, prepare_model
from tightkv.planning import Footprint

__all__ = ["pool_bytes", "sequence_bytes"]


def pool_bytes(config: EngineConfig, model: LoadedModel, num_tokens: int) -> int:
    """Bytes of all layers' blocks for `num_tokens` tokens, as if none ever left a window.

    Raises:
        ConfigError, ScaleError: as the engine would.
    """
    return _footprint(config, model, max_chunk=num_tokens).most(num_tokens)


def sequence_bytes(config: EngineConfig, model: LoadedModel, num_tokens: int) -> int:
    """Bytes that one sequence of `num_tokens` tokens holds at most, computed chunk by chunk.

    Raises:
        ConfigError, ScaleError: as the engine would.
    """
    chunk = config.scheduler.max_num_batched_tokens
    return _footprint(config, model, chunk).most(num_tokens)


def _footprint(config: EngineConfig, model: LoadedModel, max_chunk: int) -> Footprint:
    cache = config.cache
    geometry = prepare_model(model.model)
    sources = replace(PolicySources.read(cache), checkpoint=model.kv_scales)
    # Channel factors of a probe are missing here; they take no bytes of the cache.
    policy = resolve_policy(cache, geometry, sources)
    groups = group_layers(resolve_specs(policy, geometry, cache.block_size, model.dtype))
    return Footprint.of(groups, cache.block_size, max_chunk)
