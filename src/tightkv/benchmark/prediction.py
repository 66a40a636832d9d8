"""What `plan` says of a cache precision before anything is loaded: the one place that asks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightkv.capacity import plan
from tightkv.config import EngineConfig
from tightkv.engine.arm_spec import ArmSpec
from tightkv.planning import CapacityPlan

__all__ = ["Prediction", "pool_for", "predict"]

_ANY_POOL = 2**30  # to ask what requests take
_MADE_LATER = "auto"  # a scales file that the engine makes at its first start


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One cache precision, as planned.

    Attributes:
        bytes_per_token: in all layers.
        pool_bytes: of all blocks.
        pool_tokens: that they hold in all layers, as if none had left a window.
        max_requests: of the asked length that fit at once.
        longest: tokens of the longest request that can be served.
    """

    bytes_per_token: float
    pool_bytes: int
    pool_tokens: int
    max_requests: float
    longest: int


def predict(
    config: EngineConfig, arms: Sequence[ArmSpec], request_len: int, pool_bytes: int | None
) -> list[Prediction]:
    """Plan each precision on this machine.

    Args:
        config: of everything but the cache's precision.
        arms: cache precisions.
        request_len: tokens of a request.
        pool_bytes: the pool's size; None: as the engine would choose it.

    Raises:
        ConfigError, CheckpointError, ScaleError: as `plan` does.
    """
    planned = _planned(config, arms, request_len, pool_bytes)
    return [
        Prediction(
            bytes_per_token=each.bytes_per_token,
            pool_bytes=each.pool_bytes,
            pool_tokens=each.num_tokens.best,
            max_requests=each.requests_at_typical_len,
            longest=min(each.longest_context, planned.settings.max_model_len),
        )
        for each in planned.formats
    ]


def pool_for(config: EngineConfig, arm: ArmSpec, request_len: int, num_requests: int) -> int:
    """Bytes of a pool that holds so many requests of this length at once.

    Raises:
        ConfigError, CheckpointError, ScaleError: as `plan` does.
    """
    (planned,) = _planned(config, [arm], request_len, _ANY_POOL, num_requests).formats
    return next(each.pool_bytes for each in planned.needed if each.num_tokens == request_len)


def _planned(
    config: EngineConfig,
    arms: Sequence[ArmSpec],
    request_len: int,
    pool_bytes: int | None,
    concurrency: int | None = None,
) -> CapacityPlan:
    return plan(
        config.model.model,
        hardware="host",
        max_model_len=config.model.max_model_len,
        typical_len=request_len,
        concurrency=concurrency,
        kv_cache_dtypes=[_entry(arm) for arm in arms],
        kv_cache_dtype_skip_layers=config.cache.kv_cache_dtype_skip_layers,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        kv_cache_memory_bytes=pool_bytes,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        dtype=config.model.dtype,
        revision=config.model.revision,
    )


def _entry(arm: ArmSpec) -> str:
    """The precision as `plan` can know it: without a file that is not there yet."""
    return arm.name.removesuffix(f"@{_MADE_LATER}")
