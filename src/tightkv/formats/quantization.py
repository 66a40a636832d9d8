"""Quantization, operation by operation, in float32: the specification of every code.

docs/formats.md gives the formula. Each step is one IEEE operation (true division, round half to
even, no fused multiply-add), so that every backend makes the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tightkv.formats.base import CodeType, TensorFormat

__all__ = ["MIN_DYNAMIC_SCALE", "Quantized", "dequantize", "quantize", "round_up_to_half"]

MIN_DYNAMIC_SCALE = 2.0**-14
"""Smallest normal fp16 number: the floor of a dynamic scale."""

_MAX_HALF = 65504.0


class Quantized(NamedTuple):
    """Codes and what was noticed while they were made."""

    codes: torch.Tensor
    """`[num_tokens, num_kv_heads, size]` of the format's code type."""
    scales: torch.Tensor | None
    """float16 `[num_tokens, num_kv_heads]` dynamic scales, or None."""
    num_clipped: torch.Tensor
    """int64 `[]`: values that lay beyond the largest code."""
    bad_tokens: torch.Tensor
    """bool `[num_tokens]`: tokens with a NaN or Inf, which is stored as 0."""


def quantize(
    x: torch.Tensor, tensor_format: TensorFormat, static_scale: torch.Tensor | None = None
) -> Quantized:
    """Turn K or V into codes.

    Args:
        x: `[num_tokens, num_kv_heads, size]`, any floating type.
        tensor_format: how to store it.
        static_scale: float32 `[num_kv_heads, size]`, if the format has one.
    """
    x = x.float()
    finite = torch.isfinite(x)
    y = torch.where(finite, x, 0.0)
    if static_scale is not None:
        y = y / static_scale
    scales = None
    if tensor_format.dynamic:
        scales = dynamic_scale(y.abs().amax(dim=-1), tensor_format.code)
        y = y / scales.float()[..., None]
    codes, num_clipped = encode(y, tensor_format.code)
    return Quantized(codes, scales, num_clipped, ~finite.all(dim=-1).all(dim=-1))


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`code * static * dynamic` as float32 `[num_tokens, num_kv_heads, size]`."""
    x = codes.float()
    if static_scale is not None:
        x = x * static_scale
    if scales is not None:
        x = x * scales.float()[..., None]
    return x


def dynamic_scale(absmax: torch.Tensor, code: CodeType) -> torch.Tensor:
    """float16 scale with `absmax / scale <= code.max_value`; 1 where absmax is 0."""
    scale = round_up_to_half((absmax / code.max_value).clamp(MIN_DYNAMIC_SCALE, _MAX_HALF))
    return torch.where(absmax == 0, 1.0, scale.float()).half()


def round_up_to_half(x: torch.Tensor) -> torch.Tensor:
    """Smallest fp16 number that is not below `x`, for `x` in fp16's normal range."""
    bits = x.float().contiguous().view(torch.int32)
    rebased = ((bits + 0x1FFF) >> 13) - ((127 - 15) << 10)
    return rebased.to(torch.int16).view(torch.float16)


def encode(y: torch.Tensor, code: CodeType) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest code of each value, saturating, and the number of clipped values."""
    num_clipped = (y.abs() >= code.clip_at).sum()
    y = y.clamp(-code.max_value, code.max_value)
    if code.dtype == torch.int8:
        y = y.round()
    return y.to(code.dtype), num_clipped
