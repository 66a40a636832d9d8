"""An engine for each cache precision that is compared, over one loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tightkv.calibration import calibrate_at_start
from tightkv.config import EngineConfig
from tightkv.engine.arm_spec import ArmSpec
from tightkv.engine.devices import resolve_device
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.resolve import quiet_log
from tightkv.errors import ConfigError
from tightkv.models import LoadedModel, load_model

__all__ = ["load_for_arms", "make_engine", "read_options"]


_DECIDED_BY_ARMS = (
    "kv_cache_dtype",
    "k_cache_dtype",
    "v_cache_dtype",
    "quantization_config_path",
    "kv_cache_scales",
)


def read_options(
    model: str | LoadedModel, options: Mapping[str, Any]
) -> tuple[EngineConfig, LoadedModel | None]:
    """The engine's settings but for the cache's precision, and the model, if it is loaded.

    Raises:
        ConfigError: for an unknown option, or one that is a part of `kv_cache_dtypes` here.
    """
    for name in _DECIDED_BY_ARMS:
        if name in options:
            raise ConfigError(
                f"{name} is not taken here: write each precision into kv_cache_dtypes, as int8, "
                "int8/fp8_e4m3 (K and V apart) or int8@scales.json."
            )
    loaded = model if isinstance(model, LoadedModel) else None
    name = model.name if isinstance(model, LoadedModel) else model
    return EngineConfig.from_options({"model": name, **options}), loaded


def load_for_arms(config: EngineConfig) -> LoadedModel:
    """The model that all engines share."""
    return load_model(config.model, resolve_device(config.device))


def make_engine(config: EngineConfig, spec: ArmSpec, model: LoadedModel) -> LLMEngine:
    """An engine with a cache of this precision.

    Raises:
        ConfigError, ScaleError: as the engine would.
    """
    skipped = spec.skip_layers or config.cache.kv_cache_dtype_skip_layers
    cache = replace(spec, skip_layers=tuple(skipped)).cache_config(config.cache)
    with quiet_log():
        config, _ = calibrate_at_start(replace(config, cache=cache), model)
        return LLMEngine(config, model=model)
