"""`--quantization-config-path auto`: calibrated once, from text of the model's own."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from tightkv.calibration.calibrate import get_kv_cache_scales
from tightkv.config import CacheConfig, EngineConfig
from tightkv.engine.devices import resolve_device
from tightkv.engine.policy import dtypes_of
from tightkv.engine.resolve import check_config
from tightkv.errors import ConfigError, ScaleError
from tightkv.files import cache_folder
from tightkv.formats import read_scales_file
from tightkv.formats.registry import canonical, dtype_name
from tightkv.models import LoadedModel, load_model

__all__ = ["calibrate_at_start"]

_logger = logging.getLogger("tightkv")

_AUTO = "auto"
_DEFAULT_DTYPE = "int8"
_NUM_SAMPLES = 16
_MAX_SEQ_LEN = 512


def calibrate_at_start(
    config: EngineConfig, model: LoadedModel | None
) -> tuple[EngineConfig, LoadedModel | None]:
    """The configuration with the path of a file in place of "auto", and the model, if loaded.

    Raises:
        ConfigError: if the cache folder cannot be used, or no format takes scales.
    """
    if config.cache.quantization_config_path != _AUTO:
        return config, model
    check_config(config)
    model = model or load_model(config.model, resolve_device(config.device))
    path = _path(model, config)
    if not _is_usable(path):
        _logger.info("calibrating once from text of the model's own (%s)", path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"The cache folder {path.parent} cannot be used ({error.strerror}): set "
                "TIGHTKV_CACHE_DIR."
            ) from error
        k_dtype, v_dtype = _dtypes(config.cache)
        get_kv_cache_scales(
            model,
            None,
            path,
            k_cache_dtype=k_dtype,
            v_cache_dtype=v_dtype,
            num_samples=_NUM_SAMPLES,
            max_seq_len=min(_MAX_SEQ_LEN, model.max_position),
            max_model_len=config.model.max_model_len,
        )
    return replace(config, cache=replace(config.cache, quantization_config_path=str(path))), model


def _dtypes(cache: CacheConfig) -> tuple[str, ...]:
    default = CacheConfig().kv_cache_dtype
    return tuple(_DEFAULT_DTYPE if dtype == default else dtype for dtype in dtypes_of(cache))


def _path(model: LoadedModel, config: EngineConfig) -> Path:
    parts = (
        model.identity.weights[:32],
        dtype_name(model.dtype),
        *map(canonical, _dtypes(config.cache)),
        str(config.model.max_model_len or model.max_position),
    )
    return cache_folder("scales") / f"{'-'.join(parts)}.json"


def _is_usable(path: Path) -> bool:
    try:
        read_scales_file(path)
    except ScaleError:
        return False
    return True
