"""Bytes of a pool of so many tokens, before there is an engine."""

from __future__ import annotations

from dataclasses import replace

from tightkv.config import EngineConfig
from tightkv.engine.policy import PolicySources, resolve_policy
from tightkv.engine.resolve import resolve_specs
from tightkv.kvcache import group_layers
from tightkv.models import LoadedModel, prepare_model

__all__ = ["pool_bytes"]


def pool_bytes(config: EngineConfig, model: LoadedModel, num_tokens: int) -> int:
    """Bytes of all layers' blocks for `num_tokens` tokens of one sequence.

    Raises:
        ConfigError, ScaleError: as the engine would.
    """
    cache = config.cache
    geometry = prepare_model(model.model)
    sources = replace(PolicySources.read(cache), checkpoint=model.kv_scales)
    # Channel factors of a probe are missing here; they take no bytes of the cache.
    policy = resolve_policy(cache, geometry, sources)
    groups = group_layers(resolve_specs(policy, geometry, cache.block_size, model.dtype))
    return -(-num_tokens // cache.block_size) * sum(group.block_bytes for group in groups)
