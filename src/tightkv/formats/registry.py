"""`kv_cache_dtype` strings become formats here and nowhere else."""

from __future__ import annotations

import torch

from tightkv.errors import ScaleError, UnsupportedFormatError
from tightkv.formats.base import CODE_TYPES, TensorFormat
from tightkv.formats.scales import TensorScale

__all__ = [
    "KV_CACHE_DTYPES",
    "UNSCALED_DTYPES",
    "canonical",
    "dtype_name",
    "needs_scale",
    "resolve_format",
    "takes_scales",
    "wants_probe",
]

_ALIASES = {"fp8": "fp8_e4m3"}
UNSCALED_DTYPES = ("float32", "float16", "bfloat16")
_PER_TOKEN_HEAD = {"int8_per_token_head": "int8", "fp8_per_token_head": "fp8_e4m3"}

KV_CACHE_DTYPES = (
    "auto",
    *UNSCALED_DTYPES,
    "int8",
    "int8_per_token_head",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_per_token_head",
)
"""Every string that `--kv-cache-dtype` takes."""


def canonical(kv_cache_dtype: str) -> str:
    """The dtype's own name: "fp8" → "fp8_e4m3"."""
    return _ALIASES.get(kv_cache_dtype, kv_cache_dtype)


def takes_scales(kv_cache_dtype: str) -> bool:
    """Whether static scales can go with the dtype."""
    name = canonical(kv_cache_dtype)
    return name in CODE_TYPES and name not in UNSCALED_DTYPES


def needs_scale(kv_cache_dtype: str) -> bool:
    """Whether a scales file must have a scale: without, what the dtype means would be unclear."""
    return takes_scales(kv_cache_dtype) and canonical(kv_cache_dtype) != "fp8_e5m2"


def wants_probe(kv_cache_dtype: str) -> bool:
    """Whether channel factors come from a probe where there are no scales."""
    return kv_cache_dtype == "int8"


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float16` → "float16"."""
    return str(dtype).removeprefix("torch.")


def resolve_format(
    kv_cache_dtype: str, model_dtype: torch.dtype, scale: TensorScale | None = None
) -> TensorFormat:
    """Format of K or V in one layer.

    Args:
        kv_cache_dtype: one of `KV_CACHE_DTYPES`.
        model_dtype: what "auto" stands for.
        scale: the layer's static scale, where there is one.

    Raises:
        UnsupportedFormatError: for an unknown string.
        ScaleError: for a scale that the format has no place for.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise UnsupportedFormatError(
            f"Unknown KV cache dtype {kv_cache_dtype!r}: choose one of "
            f"{', '.join(KV_CACHE_DTYPES)}."
        )
    name = dtype_name(model_dtype) if kv_cache_dtype == "auto" else kv_cache_dtype
    name = _ALIASES.get(name, name)
    if kv_cache_dtype == "auto" and name not in UNSCALED_DTYPES:
        raise UnsupportedFormatError(
            f"The model's data type {name!r} is no KV cache format: choose one of "
            f"{', '.join(KV_CACHE_DTYPES[1:])}."
        )
    if name in UNSCALED_DTYPES or name in _PER_TOKEN_HEAD:
        if scale is not None:
            raise ScaleError(
                f"KV cache dtype {name!r} takes no static scale, but one was given: "
                "leave the scales out, or choose int8, fp8_e4m3 or fp8_e5m2."
            )
        return TensorFormat(
            name, CODE_TYPES[_PER_TOKEN_HEAD.get(name, name)], dynamic=name in _PER_TOKEN_HEAD
        )
    if scale is not None:
        return TensorFormat(name, CODE_TYPES[name], dynamic=scale.dynamic, static=scale.granularity)
    # Without data: scaled at run time, save for E5M2, whose range needs no scale.
    return TensorFormat(name, CODE_TYPES[name], dynamic=name != "fp8_e5m2")
