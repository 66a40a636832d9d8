"""Static scales: their values, their granularity, and the checks on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tightkv.errors import ScaleError
from tightkv.formats.base import Granularity

__all__ = [
    "KVCachePolicy",
    "KVCacheScales",
    "LayerPolicy",
    "LayerScales",
    "TensorPolicy",
    "TensorScale",
    "audible",
]

_QUIETEST = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class TensorScale:
    """Static factors of K or of V in one layer: `x ≈ code * scale` (times the dynamic scale).

    Attributes:
        values: float32, `[]` per tensor, `[num_kv_heads]` per head,
            `[num_kv_heads, head_size]` per channel.
        dynamic: whether a dynamic scale per token and head goes on top (the two-factor form).

    Raises:
        ScaleError: if the shape fits no granularity, or a value is not finite and positive.
    """

    values: torch.Tensor
    dynamic: bool = False

    def __post_init__(self) -> None:
        if self.values.dim() > 2:
            raise ScaleError(
                f"A static scale has shape {list(self.values.shape)}: allowed are [], "
                "[num_kv_heads] and [num_kv_heads, head_size]; reshape it."
            )
        usable = torch.isfinite(self.values) & (self.values > 0)
        if not bool(usable.all()):
            wrong = self.values[~usable].flatten()[0].item()
            raise ScaleError(
                f"A static scale is {wrong}: every scale must be finite and above 0; recalibrate."
            )

    @property
    def granularity(self) -> Granularity:
        return (Granularity.TENSOR, Granularity.HEAD, Granularity.CHANNEL)[self.values.dim()]

    def per_channel(self, num_kv_heads: int, size: int) -> torch.Tensor:
        """The factors as float32 `[num_kv_heads, size]`, whatever their granularity.

        Raises:
            ScaleError: if they were made for other numbers of heads or channels.
        """
        shape = (num_kv_heads, size)[: self.values.dim()]
        if tuple(self.values.shape) != shape:
            raise ScaleError(
                f"A static scale per {self.granularity.value} has shape "
                f"{list(self.values.shape)}: this layer needs {list(shape)}; "
                "it was made for another model."
            )
        factors = self.values.float().reshape(*shape, *(1,) * (2 - len(shape)))
        return factors.expand(num_kv_heads, size).contiguous()

    def fingerprint(self) -> bytes:
        """Bytes that differ whenever the scales do; they seed the prefix cache's hashes."""
        values = self.values.float().contiguous().cpu()
        return repr((tuple(values.shape), self.dynamic)).encode() + values.numpy().tobytes()


@dataclass(frozen=True, slots=True)
class LayerScales:
    """Static scales of one layer; None where K or V has none."""

    k: TensorScale | None = None
    v: TensorScale | None = None


KVCacheScales = Mapping[int, LayerScales]
"""Static scales by layer index."""


def audible(magnitude: torch.Tensor) -> torch.Tensor:
    """Magnitudes by channel `[num_kv_heads, size]`, none of them 0.

    A channel below a hundredth of its head's median counts as that loud, so that one which was
    silent on some text does not blow up what it says later.
    """
    quietest = _QUIETEST * magnitude.median(dim=-1, keepdim=True).values
    heard = torch.maximum(magnitude, quietest)
    return torch.where(heard > 0, heard, 1.0)


@dataclass(frozen=True, slots=True)
class TensorPolicy:
    """How K or V of one layer is to be stored.

    Attributes:
        kv_cache_dtype: one of `KV_CACHE_DTYPES`.
        scale: its static scale, where it has one.
        source: where the scale comes from, for the log.
    """

    kv_cache_dtype: str
    scale: TensorScale | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class LayerPolicy:
    """How K and V of one layer are to be stored."""

    k: TensorPolicy
    v: TensorPolicy


KVCachePolicy = Mapping[int, LayerPolicy]
"""By layer index."""
