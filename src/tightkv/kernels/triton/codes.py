"""From float32 to a code and back, in integer arithmetic.

docs/formats.md is the specification. Triton's own casts are not used to make codes: below compute
capability 8.9 there is none to E4M3, and its interpreter's does not round to nearest even.
"""

# Triton compiles what follows a return, too, unless it stands in an else.
# ruff: noqa: RET505

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "decode",
    "decode_pair",
    "dynamic_scale",
    "encode",
    "split_pair",
    "split_terms",
    "to_int8",
]

# A code type by the bits of its mantissa.
INT8 = tl.constexpr(0)
FP8_E5M2 = tl.constexpr(2)
FP8_E4M3 = tl.constexpr(3)
BFLOAT16 = tl.constexpr(7)
FLOAT32 = tl.constexpr(23)

_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest whole number
_TO_INTEGER_BITS = tl.constexpr(0x4B400000)
_MIN_SCALE = tl.constexpr(2.0**-14)
_MAX_SCALE = tl.constexpr(65504.0)
_REBASE = tl.constexpr((127 - 15) << 10)

_E4M3_TO_HALF = tl.constexpr(
    """{
    .reg .b32 both;
    cvt.rn.f16x2.e4m3x2 both, $2;
    mov.b32 {$0, $1}, both;
    }"""
)
# Two units at a time: the lower codes of both, and the upper ones.
_INT8_TO_HALF = tl.constexpr(
    """{
    .reg .b32 low, high, bias;
    mov.b32 bias, 0x64806480;
    and.b32 low, $2, 0x00ff00ff;
    shr.u32 high, $2, 8;
    and.b32 high, high, 0x00ff00ff;
    xor.b32 low, low, bias;
    xor.b32 high, high, bias;
    sub.rn.f16x2 $0, low, bias;
    sub.rn.f16x2 $1, high, bias;
    }"""
)
# Four units at a time.
_SPLIT_INT8 = tl.constexpr(
    """{
    prmt.b32 $0, $2, $3, 0x6420;
    prmt.b32 $1, $2, $3, 0x7531;
    }"""
)


@triton.jit
def encode(y: tl.tensor, T: tl.constexpr) -> tl.tensor:
    """Codes of finite or infinite float32 numbers: clamped, to nearest, ties to even."""
    y = tl.minimum(tl.maximum(y, -T.max_value), T.max_value)
    if T.mantissa == INT8:
        return to_int8(y)
    elif T.mantissa == FLOAT32:
        return y.to(tl.int32, bitcast=True)
    elif T.code_bytes == 1:
        sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (sign | _encode_magnitude(y, T)).to(tl.uint8)
    else:
        sign = (y.to(tl.int32, bitcast=True) >> 16) & 0x8000
        return (sign | _encode_magnitude(y, T)).to(tl.int16)


@triton.jit
def to_int8(y: tl.tensor) -> tl.tensor:
    """The nearest whole number, ties to even, of one within -127 and 127."""
    return ((y + _TO_INTEGER).to(tl.int32, bitcast=True) - _TO_INTEGER_BITS).to(tl.int8)


@triton.jit
def _encode_magnitude(y: tl.tensor, T: tl.constexpr) -> tl.tensor:
    """Bits of the nearest narrow float number, without its sign."""
    magnitude = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    drop = 23 - T.mantissa
    code = (magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop
    if T.bias != 127:
        code -= (127 - T.bias) << T.mantissa
        # Below the smallest normal number a step is constant: that of a float32 of this size.
        holder = tl.full(y.shape, 2.0 ** (24 - T.bias - T.mantissa), tl.float32)
        absolute = magnitude.to(tl.float32, bitcast=True)
        steps = (absolute + holder).to(tl.int32, bitcast=True) - holder.to(tl.int32, bitcast=True)
        code = tl.where(magnitude < ((128 - T.bias) << 23), steps, code)
    return code


@triton.jit
def dynamic_scale(absmax: tl.tensor, T: tl.constexpr) -> tl.tuple:
    """Bits of the fp16 scale, rounded up, and the same as float32; 1 where absmax is 0."""
    scale = tl.div_rn(absmax, tl.full(absmax.shape, T.max_value, tl.float32))
    scale = tl.minimum(tl.maximum(scale, _MIN_SCALE), _MAX_SCALE)
    half = ((scale.to(tl.int32, bitcast=True) + 0x1FFF) >> 13) - _REBASE
    half = tl.where(absmax == 0.0, 0x3C00, half)
    return half.to(tl.int16), ((half + _REBASE) << 13).to(tl.float32, bitcast=True)


@triton.jit
def decode(stored: tl.tensor, S: tl.constexpr, MANTISSA: tl.constexpr) -> tl.tensor:
    """Codes as numbers that a product takes, `[rows, columns]`; each is exact.

    One-byte codes come two in a unit, neighbours along the last axis, and are widened while in the
    thread that has loaded them: alone, the compiler would move them through shared memory byte by
    byte. E4M3 without the device's own conversion comes out 256 times too small.
    """
    if MANTISSA == FP8_E4M3 and S.native_fp8:
        low, high = tl.inline_asm_elementwise(
            _E4M3_TO_HALF,
            "=h,=h,h",
            [stored],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
        return _neighbours(low, high)
    elif MANTISSA == FP8_E4M3:
        bits = stored.to(tl.uint16, bitcast=True)
        low = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        high = (bits & 0x8000) | ((bits & 0x7F00) >> 1)
        return _neighbours(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))
    elif MANTISSA == FP8_E5M2:
        bits = stored.to(tl.uint16, bitcast=True)
        low, high = bits << 8, bits & 0xFF00
        return _neighbours(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))
    elif MANTISSA == BFLOAT16 and S.interpreted:
        return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif MANTISSA == BFLOAT16:
        return stored.to(tl.bfloat16, bitcast=True)
    else:
        return stored


@triton.jit
def _neighbours(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    return tl.reshape(tl.join(first, second), [first.shape[0], first.shape[1] * 2])


@triton.jit
def decode_pair(pairs: tl.tensor, S: tl.constexpr) -> tl.tuple:
    """The two int8 codes of an int16 unit, as float16, the lower one first.

    0x6400 is 1024 as float16, in which a step is 1: the code plus 128 goes into the lowest bits.
    """
    if S.ptx:
        return tl.inline_asm_elementwise(
            _INT8_TO_HALF,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return _plain_pair(pairs)


@triton.jit
def _plain_pair(pairs: tl.tensor) -> tl.tuple:
    low = (((pairs & 0xFF) ^ 0x6480).to(tl.int16)).to(tl.float16, bitcast=True) - 1152.0
    high = ((((pairs >> 8) & 0xFF) ^ 0x6480).to(tl.int16)).to(tl.float16, bitcast=True) - 1152.0
    return low, high


@triton.jit
def split_pair(pairs: tl.tensor, S: tl.constexpr) -> tl.tuple:
    """The two int8 codes of an int16 unit as they are, the lower one first."""
    if S.ptx:
        return tl.inline_asm_elementwise(
            _SPLIT_INT8,
            "=r,=r,r,r",
            [pairs],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        return pairs.to(tl.int8), (pairs >> 8).to(tl.int8)


@triton.jit
def split_terms(
    x: tl.tensor,
    S: tl.constexpr,
    MANTISSA: tl.constexpr,
    TERMS: tl.constexpr,
) -> tl.tuple:
    """Narrow numbers whose sum is `x`, the smallest first; a product with codes takes them.

    The more terms, the less is lost: two of float16 have 22 bits, three of bfloat16 24.
    """
    if MANTISSA == FLOAT32:
        return (x,)
    elif MANTISSA == BFLOAT16:
        return _bfloat16_terms(x, S, TERMS)
    elif TERMS == 1:
        return (x.to(tl.float16),)
    else:
        first = x.to(tl.float16)
        return ((x - first.to(tl.float32)).to(tl.float16), first)


@triton.jit
def _bfloat16_terms(x: tl.tensor, S: tl.constexpr, TERMS: tl.constexpr) -> tl.tuple:
    first = x.to(tl.bfloat16).to(tl.float32)
    rest = x - first
    second = rest.to(tl.bfloat16).to(tl.float32)
    third = (rest - second).to(tl.bfloat16).to(tl.float32)
    if TERMS == 1:
        return (_narrow(first, S),)
    elif TERMS == 2:
        return (_narrow(second, S), _narrow(first, S))
    else:
        return (_narrow(third, S), _narrow(second, S), _narrow(first, S))


@triton.jit
def _narrow(x: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """A bfloat16 number as a product takes it: the interpreter has no bfloat16 products."""
    if S.interpreted:
        return x
    else:
        return x.to(tl.bfloat16)
