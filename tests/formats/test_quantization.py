"""Codes by hand, by an independent table, and the error bound of docs/formats.md."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_cases import tensor_format
from tightkv.formats.base import CODE_TYPES, CodeType
from tightkv.formats.quantization import (
    MIN_DYNAMIC_SCALE,
    dequantize,
    dynamic_scale,
    encode,
    quantize,
    round_up_to_half,
)

INF, NAN = float("inf"), float("nan")

# Exponent bits and mantissa bits.
FLOAT_SHAPES = {"float16": (5, 10), "bfloat16": (8, 7), "fp8_e4m3": (4, 3), "fp8_e5m2": (5, 2)}


def code_bits(codes: torch.Tensor) -> torch.Tensor:
    """Codes as non-negative integers."""
    unsigned = codes.view(torch.uint8) if codes.itemsize == 1 else codes.view(torch.int16)
    return unsigned.long() & (0xFF if codes.itemsize == 1 else 0xFFFF)


def finite_values(name: str) -> torch.Tensor:
    """Every finite value from 0 up in the order of its code, by the formula of IEEE 754."""
    exponent_bits, mantissa_bits = FLOAT_SHAPES[name]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        if (code == 0x7F) if name == "fp8_e4m3" else (exponent == 2**exponent_bits - 1):
            break  # NaN, or Inf
        if exponent == 0:
            values.append(math.ldexp(mantissa, 1 - bias - mantissa_bits))
        else:
            values.append(math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits))
    return torch.tensor(values, dtype=torch.float32)


def encode_one(x: float, code: CodeType) -> float:
    return float(encode(torch.tensor([x]), code)[0].float())


@pytest.mark.parametrize(
    ("name", "x", "bits"),
    [
        ("float32", [1.0, -2.5], [0x3F800000, 0xC0200000]),
        ("float16", [1.0, -1.5, 65504.0, 2.0**-24, 2.0**-25], [0x3C00, 0xBE00, 0x7BFF, 1, 0]),
        ("float16", [1.0 + 2**-11, 1.0 + 3 * 2**-11], [0x3C00, 0x3C02]),
        ("bfloat16", [1.0, -2.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8], [0x3F80, 0xC000, 0x3F80, 0x3F82]),
        ("int8", [0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 126.6], [0, 2, 2, 0, 254, 129, 127]),
        ("fp8_e4m3", [1.0, -1.125, 448.0, 2.0**-9, 2.0**-10], [0x38, 0xB9, 0x7E, 1, 0]),
        ("fp8_e4m3", [1.0625, 1.1875, 3 * 2.0**-10], [0x38, 0x3A, 2]),
        ("fp8_e5m2", [1.0, -1.25, 57344.0, 2.0**-16, 2.0**-17], [0x3C, 0xBD, 0x7B, 1, 0]),
        ("fp8_e5m2", [1.125, 1.375], [0x3C, 0x3E]),
    ],
)
def test_codes_by_hand(name: str, x: list[float], bits: list[int]) -> None:
    codes, num_clipped = encode(torch.tensor(x), CODE_TYPES[name])
    if name == "float32":
        assert [int(code) & 0xFFFFFFFF for code in codes.view(torch.int32)] == bits
    else:
        assert code_bits(codes).tolist() == bits
    assert num_clipped == 0


@pytest.mark.parametrize("name", FLOAT_SHAPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_value_and_midpoint(name: str, sign: float) -> None:
    """The nearest code, and the even one of two: by table, by torch's cast and by `encode`."""
    code = CODE_TYPES[name]
    values = finite_values(name)
    index = torch.arange(len(values) - 1)
    middle = (values[:-1].double() + values[1:].double()).mul(0.5).float()
    x = torch.cat(
        [
            values,
            middle,
            torch.nextafter(middle, torch.tensor(INF)),
            torch.nextafter(middle, torch.tensor(0.0)),
        ]
    )
    even = index + index % 2
    expected = torch.cat([torch.arange(len(values)), even, index + 1, index])
    sign_bit = 0 if sign > 0 else 1 << (8 * code.num_bytes - 1)
    codes, num_clipped = encode(sign * x, code)
    assert torch.equal(code_bits(codes), expected + sign_bit)
    assert torch.equal(code_bits((sign * x).to(code.dtype)), expected + sign_bit)
    assert num_clipped == 0
    assert values[-1] == code.max_value


def test_every_int8_code_and_midpoint() -> None:
    whole = torch.arange(-127, 128).float()
    assert encode(whole, CODE_TYPES["int8"])[0].tolist() == list(range(-127, 128))
    middle = whole[:-1] + 0.5
    expected = [n if n % 2 == 0 else n + 1 for n in range(-127, 127)]
    assert encode(middle, CODE_TYPES["int8"])[0].tolist() == expected


@pytest.mark.parametrize("code", CODE_TYPES.values(), ids=lambda code: code.name)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_clip_count_starts_half_a_step_above_the_largest_code(code: CodeType, sign: float) -> None:
    at = torch.tensor([sign * code.clip_at])
    below = torch.nextafter(at, torch.tensor(0.0))
    for x, count in ((at, 1), (below, 0), (torch.cat([at, below, at]), 2)):
        codes, num_clipped = encode(x, code)
        assert num_clipped == count
        assert (codes.float() == sign * code.max_value).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_clip_at_lies_half_a_step_above_the_largest_value(name: str) -> None:
    code = CODE_TYPES[name]
    largest, below = finite_values(name)[-1].item(), finite_values(name)[-2].item()
    assert code.clip_at == largest + (largest - below) / 2


@pytest.mark.parametrize("code", CODE_TYPES.values(), ids=lambda code: code.name)
def test_never_wraps(code: CodeType) -> None:
    assert encode_one(2.0**127, code) == min(2.0**127, code.max_value)
    codes = encode(torch.tensor([INF, -INF]), code)[0].float()
    assert codes.tolist() == [code.max_value, -code.max_value]


@pytest.mark.parametrize("name", [*CODE_TYPES, "int8+dynamic", "int8+channel+dynamic"])
def test_nan_and_inf_are_stored_as_zero_and_flagged(name: str) -> None:
    x = torch.ones(5, 2, 4)
    x[1, 0, 2], x[3, 1, 0], x[4, 0, 0] = NAN, INF, -INF
    static = torch.full((2, 4), 0.5) if "channel" in name else None
    result = quantize(x, tensor_format(name), static)
    assert result.bad_tokens.tolist() == [False, True, False, True, True]
    assert result.num_clipped == 0
    zero = (result.codes.float() == 0).nonzero().tolist()
    assert zero == [[1, 0, 2], [3, 1, 0], [4, 0, 0]]
    assert torch.equal(
        quantize(x.nan_to_num(0.0, 0.0, 0.0), tensor_format(name), static)[0], result[0]
    )


def test_static_factor_is_divided_out_first() -> None:
    x = torch.tensor([[[1.0, 4.0], [9.0, -16.0]]])
    static = torch.tensor([[0.5, 2.0], [3.0, 4.0]])
    result = quantize(x, tensor_format("int8+channel"), static)
    assert result.codes.tolist() == [[[2, 2], [3, -4]]]
    assert result.scales is None
    assert torch.equal(dequantize(result.codes, None, static), x)


def test_two_factors_by_hand() -> None:
    """y = x / static = [127, -254]; scale = 254 / 127 = 2; codes = y / 2."""
    static = torch.tensor([[0.5, 0.25]])
    result = quantize(
        torch.tensor([[[63.5, -63.5]]]), tensor_format("int8+channel+dynamic"), static
    )
    assert result.scales is not None
    assert result.scales.tolist() == [[2.0]]
    assert result.scales.dtype == torch.float16
    assert result.codes.tolist() == [[[64, -127]]]  # 63.5 rounds to the even 64


def test_inputs_of_any_type() -> None:
    x = torch.linspace(-3, 3, 48).reshape(3, 2, 8)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        narrow = quantize(x.to(dtype), tensor_format("int8+dynamic"))
        wide = quantize(x.to(dtype).float(), tensor_format("int8+dynamic"))
        assert torch.equal(narrow.codes, wide.codes)


# ---- dynamic scales ----


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_dynamic_scale_is_the_smallest_half_above(name: str) -> None:
    code = CODE_TYPES[name]
    generator = torch.Generator().manual_seed(0)
    absmax = torch.exp(torch.empty(20_000).uniform_(-9.0, 11.0, generator=generator))
    absmax = absmax * code.max_value
    absmax = absmax.clamp(2 * MIN_DYNAMIC_SCALE * code.max_value, 60_000 * code.max_value)
    scale = dynamic_scale(absmax, code)
    exact = absmax / code.max_value
    assert (scale.float() >= exact).all()
    smaller = (scale.view(torch.int16) - 1).view(torch.float16)
    assert (smaller.float() < exact).all()
    assert (scale.float() > exact).any()


def test_round_up_to_half_is_exact_on_every_normal_number() -> None:
    half = torch.arange(0x0400, 0x7C00, dtype=torch.int16).view(torch.float16)
    assert torch.equal(round_up_to_half(half.float()), half)
    above = torch.nextafter(half.float(), torch.tensor(INF))
    assert torch.equal(round_up_to_half(above[:-1]), half[1:])
    below = torch.nextafter(half.float(), torch.tensor(0.0))
    assert torch.equal(round_up_to_half(below[1:]), half[1:])


def test_dynamic_scale_at_its_limits() -> None:
    code = CODE_TYPES["int8"]
    absmax = torch.tensor([0.0, 1e-45, 127 * 2.0**-14, 127 * 2.0**-13, 127 * 65504.0, 1e38, INF])
    expected = [1.0, 2.0**-14, 2.0**-14, 2.0**-13, 65504.0, 65504.0, 65504.0]
    assert dynamic_scale(absmax, code).tolist() == expected
    just_above = torch.nextafter(torch.tensor(127 * 2.0**-14), torch.tensor(INF))
    assert dynamic_scale(just_above, code) > 2.0**-14


@pytest.mark.parametrize("name", ["int8+dynamic", "fp8_e4m3+dynamic", "fp8_e5m2+dynamic"])
def test_zero_rows_have_scale_one(name: str) -> None:
    x = torch.zeros(2, 2, 4)
    x[1, 1, 0] = 5.0
    result = quantize(x, tensor_format(name))
    assert result.scales is not None
    assert result.scales[0].tolist() == [1.0, 1.0]
    assert result.scales[1, 0] == 1.0
    assert result.scales[1, 1] != 1.0
    assert not result.codes[0].float().any()


def test_beyond_the_largest_scale_is_clipped_and_counted() -> None:
    x = torch.tensor([[[127 * 65504.0, 128 * 65504.0, 1e30, 1.0]]])
    result = quantize(x, tensor_format("int8+dynamic"))
    assert result.codes.tolist() == [[[127, 127, 127, 0]]]
    assert result.num_clipped == 2


def test_one_scale_per_token_and_head() -> None:
    x = torch.tensor([1.0, 10.0, 100.0, 1000.0]).reshape(2, 2, 1).expand(2, 2, 6)
    result = quantize(x, tensor_format("int8+dynamic"))
    assert result.scales is not None
    assert len(result.scales.unique()) == 4
    assert (result.codes.abs() >= 126).all()


# ---- the bound of docs/formats.md ----


def error_bound(
    x: torch.Tensor, code: CodeType, step: torch.Tensor, static: torch.Tensor
) -> torch.Tensor:
    """Largest |x - dequantize(quantize(x))| of an unclipped value, in float64.

    `step` is static times dynamic. Each of at most four float32 operations (two divisions, two
    products) adds 2^-24 of its result, or half a subnormal.
    """
    if code.name == "int8":
        rounding = 0.5 * step
    else:
        exponent_bits, mantissa_bits = FLOAT_SHAPES.get(code.name, (8, 23))
        bias = 2 ** (exponent_bits - 1) - 1
        relative = 2.0 ** -(mantissa_bits + 1) * x.abs()
        rounding = torch.maximum(relative, step * 2.0 ** -(bias + mantissa_bits))
        if code.name == "float32":
            rounding = torch.zeros_like(x)
    tiny = 2.0**-149 * (1 + static + step)
    return rounding + 5 * 2.0**-24 * (x.abs() + rounding) + 2 * tiny


FORMATS = [
    "float32",
    "float16",
    "bfloat16",
    *(
        f"{code}{scales}"
        for code in ("int8", "fp8_e4m3", "fp8_e5m2")
        for scales in ("", "+dynamic", "+channel", "+channel+dynamic")
    ),
]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", FORMATS)
def test_error_stays_within_the_bound(name: str, data: st.DataObject) -> None:
    limit = 2.0**100
    numbers = st.one_of(
        st.floats(-limit, limit, width=32, allow_nan=False),
        st.floats(-100.0, 100.0, width=32),
        st.just(0.0),
    )
    size = data.draw(st.integers(1, 6))
    x = torch.tensor(data.draw(st.lists(numbers, min_size=2 * size, max_size=2 * size)))
    x = x.reshape(2, 1, size)
    tensor_fmt = tensor_format(name)
    static = None
    if tensor_fmt.static is not None:
        factors = st.floats(2.0**-20, 2.0**20, width=32)
        static = torch.tensor([data.draw(st.lists(factors, min_size=size, max_size=size))])
    result = quantize(x, tensor_fmt, static)
    assert not result.bad_tokens.any()
    if result.scales is not None:
        assert (result.scales > 0).all()

    back = dequantize(result.codes, result.scales, static)
    factor = torch.ones(1, size, dtype=torch.float64) if static is None else static.double()
    step = factor.expand(x.shape)
    if result.scales is not None:
        step = step * result.scales.double()[..., None]
    # The quotient itself is rounded, hence the margin around `clip_at`.
    inside = x.double().abs() < tensor_fmt.code.clip_at * step * (1 - 2.0**-20)
    outside = x.double().abs() > tensor_fmt.code.clip_at * step * (1 + 2.0**-20)
    error = (x.double() - back.double()).abs()
    assert (error <= error_bound(x.double(), tensor_fmt.code, step, factor))[inside].all()
    assert (result.codes.float().abs() == tensor_fmt.code.max_value)[outside].all()
    assert int(outside.sum()) <= int(result.num_clipped) <= int((~inside).sum())
    if tensor_fmt.dynamic:  # clips only where the scale itself has reached its end
        clipped_rows = (~inside).any(dim=-1)
        assert result.scales is not None
        assert (result.scales[clipped_rows] == 65504.0).all()


def test_the_bound_is_tight() -> None:
    """A bound that nothing reaches would let a coarser code pass."""
    x = torch.tensor([[[127.0, 63.5, 0.499]]])
    result = quantize(x, tensor_format("int8"))
    error = (x - dequantize(result.codes)).abs().double()
    bound = error_bound(x.double(), CODE_TYPES["int8"], torch.ones(1), torch.ones(1))
    assert error.max() > 0.99 * bound.max()
