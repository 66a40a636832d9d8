"""Strings become formats; what does not fit is refused in one sentence."""

from __future__ import annotations

import pytest
import torch

from tightkv.errors import ConfigError, ScaleError, UnsupportedFormatError
from tightkv.formats import KV_CACHE_DTYPES, Granularity, TensorScale, resolve_format

STATIC = TensorScale(torch.tensor(0.5))
TWO_FACTOR = TensorScale(torch.ones(2, 4), dynamic=True)

# string -> (name, code, dynamic) without a scale
WITHOUT_SCALES = {
    "auto": ("float16", "float16", False),
    "float32": ("float32", "float32", False),
    "float16": ("float16", "float16", False),
    "bfloat16": ("bfloat16", "bfloat16", False),
    "int8": ("int8", "int8", True),
    "int8_per_token_head": ("int8_per_token_head", "int8", True),
    "fp8": ("fp8_e4m3", "fp8_e4m3", True),
    "fp8_e4m3": ("fp8_e4m3", "fp8_e4m3", True),
    "fp8_e5m2": ("fp8_e5m2", "fp8_e5m2", False),
    "fp8_per_token_head": ("fp8_per_token_head", "fp8_e4m3", True),
}
SCALABLE = ("int8", "fp8", "fp8_e4m3", "fp8_e5m2")


def is_one_sentence(message: str) -> bool:
    return message.endswith(".") and ". " not in message and "\n" not in message


def test_every_string_is_tested_here() -> None:
    assert set(WITHOUT_SCALES) == set(KV_CACHE_DTYPES)
    assert len(set(KV_CACHE_DTYPES)) == len(KV_CACHE_DTYPES)


@pytest.mark.parametrize("string", KV_CACHE_DTYPES)
def test_without_scales(string: str) -> None:
    result = resolve_format(string, torch.float16)
    assert (result.name, result.code.name, result.dynamic) == WITHOUT_SCALES[string]
    assert result.static is None


@pytest.mark.parametrize("string", SCALABLE)
@pytest.mark.parametrize(
    ("values", "granularity"),
    [
        (torch.tensor(1.0), Granularity.TENSOR),
        (torch.ones(2), Granularity.HEAD),
        (torch.ones(2, 4), Granularity.CHANNEL),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_with_scales(
    string: str, values: torch.Tensor, granularity: Granularity, dynamic: bool
) -> None:
    result = resolve_format(string, torch.float16, TensorScale(values, dynamic))
    assert result.static is granularity
    assert result.dynamic is dynamic
    assert result.code.name == WITHOUT_SCALES[string][1]


@pytest.mark.parametrize("string", [s for s in KV_CACHE_DTYPES if s not in SCALABLE])
@pytest.mark.parametrize("scale", [STATIC, TWO_FACTOR])
def test_scales_without_a_place_are_an_error(string: str, scale: TensorScale) -> None:
    with pytest.raises(ScaleError) as error:
        resolve_format(string, torch.float16, scale)
    message = str(error.value)
    assert is_one_sentence(message)
    assert repr(WITHOUT_SCALES[string][0]) in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_auto_is_the_type_of_the_model(dtype: torch.dtype) -> None:
    result = resolve_format("auto", dtype)
    assert result.code.dtype == dtype
    assert result.name == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("string", ["fp16", "FP8", "", "int4", "float64", "auto "])
def test_unknown_string_is_one_sentence(string: str) -> None:
    with pytest.raises(UnsupportedFormatError) as error:
        resolve_format(string, torch.float16)
    message = str(error.value)
    assert isinstance(error.value, ConfigError)
    assert is_one_sentence(message)
    assert repr(string) in message
    assert all(known in message for known in KV_CACHE_DTYPES)


def test_bits_per_value() -> None:
    def bits(string: str, size: int, scale: TensorScale | None = None) -> float:
        return resolve_format(string, torch.float32, scale).effective_bits(size)

    assert bits("auto", 128) == 32
    assert bits("bfloat16", 128) == 16
    assert bits("int8", 128, STATIC) == 8
    assert bits("int8", 128, TWO_FACTOR) == 8.125
    assert bits("int8_per_token_head", 64) == 8.25
    assert bits("fp8_e5m2", 64) == 8


def test_describe_names_the_scales() -> None:
    assert resolve_format("float16", torch.float32).describe() == "float16"
    two = resolve_format("int8", torch.float32, TWO_FACTOR)
    assert two.describe() == "int8 (static per channel, dynamic per token and head)"
    assert resolve_format("fp8", torch.float32, STATIC).describe() == "fp8_e4m3 (static per tensor)"
