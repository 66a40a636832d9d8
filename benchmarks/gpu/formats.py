"""Formats of K and V that are checked and timed."""

from __future__ import annotations

from tightkv.formats.base import CODE_TYPES, Granularity, TensorFormat

BLOCK_SIZE = 16
FORMATS = {
    "float32": TensorFormat("float32", CODE_TYPES["float32"]),
    "float16": TensorFormat("float16", CODE_TYPES["float16"]),
    "bfloat16": TensorFormat("bfloat16", CODE_TYPES["bfloat16"]),
    "int8": TensorFormat("int8", CODE_TYPES["int8"]),
    "int8 static": TensorFormat("int8", CODE_TYPES["int8"], static=Granularity.CHANNEL),
    "int8 per token": TensorFormat("int8", CODE_TYPES["int8"], dynamic=True),
    "int8 two-factor": TensorFormat("int8", CODE_TYPES["int8"], True, Granularity.CHANNEL),
    "fp8_e4m3 static": TensorFormat("fp8_e4m3", CODE_TYPES["fp8_e4m3"], False, Granularity.HEAD),
    "fp8_e4m3 per token": TensorFormat("fp8_e4m3", CODE_TYPES["fp8_e4m3"], dynamic=True),
    "fp8_e5m2": TensorFormat("fp8_e5m2", CODE_TYPES["fp8_e5m2"]),
}
