"""Cache precisions as they are written in a list: "int8", "int8@scales.json", "int8/fp8_e4m3"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightkv.config import CacheConfig
from tightkv.errors import ConfigError
from tightkv.formats.registry import KV_CACHE_DTYPES

__all__ = ["ArmSpec", "parse_arm", "parse_arms"]

_FILE, _AND = "@", "/"


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """A cache precision, as asked for.

    Attributes:
        name: as it was written.
        path: of a scales file, or "auto"; None without one.
        skip_layers: layers that stay in the model's data type.
    """

    name: str
    k_cache_dtype: str
    v_cache_dtype: str
    path: str | None = None
    skip_layers: tuple[str, ...] = ()

    def cache_config(self, cache: CacheConfig) -> CacheConfig:
        """`cache` with this precision."""
        return replace(
            cache,
            kv_cache_dtype=CacheConfig().kv_cache_dtype,
            k_cache_dtype=self.k_cache_dtype,
            v_cache_dtype=self.v_cache_dtype,
            quantization_config_path=self.path,
            kv_cache_dtype_skip_layers=self.skip_layers,
        )


def parse_arm(text: str, skip_layers: Sequence[str] = ()) -> ArmSpec:
    """Read "int8", "int8@scales.json", "auto@scales.json", or K and V apart, "int8/fp8_e4m3".

    Raises:
        ConfigError: if it is none of these.
    """
    dtypes, _, path = text.strip().partition(_FILE)
    k_dtype, apart, v_dtype = dtypes.partition(_AND)
    v_dtype = v_dtype if apart else k_dtype
    for dtype in (k_dtype, v_dtype):
        if dtype not in KV_CACHE_DTYPES:
            where = "" if dtype == text.strip() else f", as in {text!r},"
            raise ConfigError(
                f"{dtype!r}{where} is no KV cache dtype: give one of "
                f"{', '.join(KV_CACHE_DTYPES)}, with @FILE behind it for a scales file, or K and V "
                "apart as int8/fp8_e4m3."
            )
    if _FILE in text and not path:
        raise ConfigError(f"--kv-cache-dtype has {text!r}: name a scales file after {_FILE}.")
    return ArmSpec(text.strip(), k_dtype, v_dtype, path or None, tuple(skip_layers))


def parse_arms(names: str | Sequence[str], skip_layers: Sequence[str] = ()) -> tuple[ArmSpec, ...]:
    """Cache precisions, as a list or with commas, each spelled as `parse_arm` reads it.

    Raises:
        ConfigError: if there is none, if one is no precision, or stands there twice.
    """
    given = [names] if isinstance(names, str) else names
    parts = [part for some in given for part in some.split(",") if part.strip()]
    if not parts:
        raise ConfigError("--kv-cache-dtype names no KV cache dtype: give at least one, as int8.")
    specs = tuple(parse_arm(part, skip_layers) for part in parts)
    known = [spec.name for spec in specs]
    twice = [name for name in known if known.count(name) > 1]
    if twice:
        raise ConfigError(f"--kv-cache-dtype has {twice[0]!r} twice: leave one out.")
    return specs
