"""A format is a value: which codes are stored, and which scales go with them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["CODE_TYPES", "CodeType", "Granularity", "TensorFormat"]


class Granularity(str, Enum):
    """What one static scale covers."""

    TENSOR = "tensor"
    HEAD = "head"
    CHANNEL = "channel"


@dataclass(frozen=True, slots=True)
class CodeType:
    """The number type of the stored codes.

    Attributes:
        dtype: torch type of one code.
        max_value: largest magnitude a code stands for.
        clip_at: half a step above `max_value`; from there on a value counts as clipped.
        interleave: neighbouring values of a dot product that lie side by side in a tile
            (2 for integers, whose products are summed in pairs).
        tolerance: bound of attention's error against `kernels/reference.py`, as a share of the
            largest output magnitude.
    """

    name: str
    dtype: torch.dtype
    max_value: float
    clip_at: float
    interleave: int
    tolerance: float

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize


_FLOAT_TOLERANCE = 4e-6
# Integer codes meet queries and weights rounded to 16 bits: seen up to 2.2e-4 for logits of
# ordinary size over some hundred keys, whose output is small against V.
_INTEGER_TOLERANCE = 5e-4

CODE_TYPES: dict[str, CodeType] = {
    code.name: code
    for code in (
        CodeType(
            "float32",
            torch.float32,
            torch.finfo(torch.float32).max,
            float("inf"),
            1,
            _FLOAT_TOLERANCE,
        ),
        CodeType("float16", torch.float16, 65504.0, 65520.0, 1, _FLOAT_TOLERANCE),
        CodeType(
            "bfloat16",
            torch.bfloat16,
            torch.finfo(torch.bfloat16).max,
            (2.0 - 2.0**-8) * 2.0**127,
            1,
            _FLOAT_TOLERANCE,
        ),
        CodeType("int8", torch.int8, 127.0, 127.5, 2, _INTEGER_TOLERANCE),
        CodeType("fp8_e4m3", torch.float8_e4m3fn, 448.0, 464.0, 1, _FLOAT_TOLERANCE),
        CodeType("fp8_e5m2", torch.float8_e5m2, 57344.0, 61440.0, 1, _FLOAT_TOLERANCE),
    )
}


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """Format of K or of V in one layer: `x ≈ code * static * dynamic`, where either may be 1.

    Attributes:
        name: the `kv_cache_dtype` it was asked for by, never "auto" and never an alias.
        code: type of the codes.
        dynamic: whether one fp16 scale per token and KV head is stored in the block.
        static: granularity of the calibrated factor, or None where there is none. Its values
            travel beside the format, as a tensor.
    """

    name: str
    code: CodeType
    dynamic: bool = False
    static: Granularity | None = None

    @property
    def tolerance(self) -> float:
        """Bound of attention's error, as a share of the largest output magnitude."""
        return self.code.tolerance

    def scale_bytes(self, num_tokens: int) -> int:
        """Bytes of the dynamic scales of `num_tokens` tokens of one KV head."""
        return 2 * num_tokens if self.dynamic else 0

    def effective_bits(self, size: int) -> float:
        """Bits per value in a head of `size` values, dynamic scale included, padding not."""
        return 8 * self.code.num_bytes + 8 * self.scale_bytes(1) / size

    def remark(self) -> str | None:
        """What a user who gave no static scales should know."""
        if self.static is not None or self.code.num_bytes > 1:
            return None
        if self.dynamic:
            return f"{self.name} without static scales: scaled at run time, per token and head"
        return f"{self.name} without static scales: values are stored as they are (scale 1)"

    @property
    def granularity(self) -> str:
        """In a word: what the scales cover, `none` where there are none."""
        if self.static and self.dynamic:
            return "two_factor"
        return self.static.value if self.static else "token_head" if self.dynamic else "none"

    def describe(self) -> str:
        """Name and scales in words, for logs and tables."""
        scales = [f"static per {self.static.value}"] if self.static else []
        scales += ["dynamic per token and head"] if self.dynamic else []
        return f"{self.name} ({', '.join(scales)})" if scales else self.name
