"""One block per format, byte by byte: the files of tests/golden, the formula, every backend.

The layout follows docs/formats.md, "The bytes of a block":

- Three sections, each padded with zeros to 64 bytes: K codes, V codes, scales of K and of V.
- K has `head_size` channels, rounded up to 2; V has `value_size`, rounded up to 16.
- Heads follow each other; a block of 16 tokens has one tile per head.
- K tile: for each group of i channels a row of 16 tokens, each with its i channels. Here i is the
  interleave: 2 for int8, else 1. So channel c of token t is code (c // i * 16 + t) * i + c % i.
- V tile: for each 16 channels, and each group of i tokens, a row of 16 channels, each with its i
  tokens. So channel c of token t is code c // 16 * 256 + (t // i * 16 + c % 16) * i + t % i.
- A dynamic scale is an fp16 number, one per head and token, in the order of tokens.

A file lists one such row per line, as hexadecimal digits. With `head_size` 5 and `value_size` 6, a
K row of padding (int8: half a row) and ten channels of V padding show as zeros. 13 of the 16 slots
are written, so the last three are zeros too.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_cases import ISAS, write
from tightkv.formats import BlockLayout, TensorScale, resolve_format
from tightkv.kernels import Backend, LayerCache
from tightkv.kernels.cpu import CpuBackend
from tightkv.kernels.ops import ReferenceBackend
from triton_cases import moved_cache, triton_backend

FOLDER = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
SECTIONS = ("k_codes", "v_codes", "k_scales", "v_scales")


def load(name: str) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return golden


def block_bytes(golden: dict[str, Any]) -> bytes:
    """The rows of a file as one block."""
    rows = golden["block"]
    block = b""
    for section in (rows["k_codes"], rows["v_codes"], rows["k_scales"] + rows["v_scales"]):
        data = bytes.fromhex("".join(section))
        block += data + bytes(-len(data) % 64)
    return block


# ---- plain Python, from the formula of docs/formats.md alone ----


def round_to_float(x: float, exponent_bits: int, mantissa_bits: int) -> tuple[int, float]:
    """Bits and value of the nearest number of such a type, ties to even; x is in its range."""
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = max(math.frexp(abs(x))[1] - 1, 1 - bias) if x else 1 - bias
    steps = round(math.ldexp(abs(x), mantissa_bits - exponent))  # Python rounds halves to even
    # A subnormal number has no implicit 1, which adds one to the exponent's field.
    bits = ((exponent + bias - 1) << mantissa_bits) + steps
    sign = 1 << (exponent_bits + mantissa_bits) if math.copysign(1, x) < 0 else 0
    value = math.copysign(math.ldexp(steps, exponent - mantissa_bits), x)
    return sign | bits, value


def float32(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def float_code(exponent_bits: int, mantissa_bits: int, largest: float) -> Callable[[float], bytes]:
    num_bytes = (1 + exponent_bits + mantissa_bits) // 8

    def code(y: float) -> bytes:
        bits, _ = round_to_float(min(max(y, -largest), largest), exponent_bits, mantissa_bits)
        return bits.to_bytes(num_bytes, "little")

    return code


# Largest value, interleave, code.
CODES: dict[str, tuple[float, int, Callable[[float], bytes]]] = {
    "float32": (math.inf, 1, lambda y: struct.pack("<f", y)),
    "float16": (65504.0, 1, float_code(5, 10, 65504.0)),
    "bfloat16": (math.inf, 1, float_code(8, 7, 3e38)),
    "int8": (127.0, 2, lambda y: struct.pack("<b", round(min(max(y, -127.0), 127.0)))),
    "fp8_e4m3": (448.0, 1, float_code(4, 3, 448.0)),
    "fp8_e5m2": (57344.0, 1, float_code(5, 2, 57344.0)),
}


def scale_above(absmax: float, largest: float) -> float:
    """Smallest fp16 number from 2^-14 up that is not below absmax / largest; 1 for a zero row."""
    if absmax == 0.0:
        return 1.0
    exact = max(float32(absmax / largest), 2.0**-14)
    bits, value = round_to_float(exact, 5, 10)
    if value < exact:
        value = float(struct.unpack("<e", struct.pack("<H", bits + 1))[0])
    return value


def derive_rows(golden: dict[str, Any], tensor: str) -> tuple[list[bytes], list[bytes]]:
    """Rows of codes, and of scales, of K or V."""
    largest, pair, code = CODES[golden["code"]]
    size = golden["head_size"] if tensor == "k" else golden["value_size"]
    rows: list[bytes] = []
    scale_rows: list[bytes] = []
    width = len(code(0.0))
    for head in range(golden["num_kv_heads"]):
        channels = size + size % 2 if tensor == "k" else -(-size // 16) * 16
        tile = bytearray(16 * channels * width)
        scales = [0.0] * 16
        for token, slot in enumerate(golden["slots"]):
            y = [float32(x) for x in golden[tensor][token][head]]
            if golden["static_scale"] is not None:
                factors = golden["static_scale"][tensor][head]
                y = [float32(x / factor) for x, factor in zip(y, factors, strict=True)]
            if golden["dynamic"]:
                scale = scales[slot] = scale_above(max(map(abs, y)), largest)
                y = [float32(x / scale) for x in y]
            for channel, x in enumerate(y):
                if tensor == "k":
                    index = (channel // pair * 16 + slot) * pair + channel % pair
                else:
                    index = channel // 16 * 256
                    index += (slot // pair * 16 + channel % 16) * pair + slot % pair
                tile[index * width : (index + 1) * width] = code(x)
        row = 16 * pair * width
        rows += [bytes(tile[i : i + row]) for i in range(0, len(tile), row)]
        if golden["dynamic"]:
            scale_rows.append(struct.pack("<16e", *scales))
    return rows, scale_rows


def derive_block(golden: dict[str, Any]) -> dict[str, list[str]]:
    """The "block" of a file from its other entries."""
    k_codes, k_scales = derive_rows(golden, "k")
    v_codes, v_scales = derive_rows(golden, "v")
    sections = (k_codes, v_codes, k_scales, v_scales)
    return {
        name: [row.hex() for row in rows] for name, rows in zip(SECTIONS, sections, strict=True)
    }


# ---- the tests ----


def test_every_code_has_a_file() -> None:
    assert {load(name)["code"] for name in NAMES} == set(CODES)


@pytest.mark.parametrize("name", NAMES)
def test_file_follows_from_the_formula(name: str) -> None:
    golden = load(name)
    assert derive_block(golden) == golden["block"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("isa", ["reference", *ISAS, "triton"])
def test_backend_writes_these_bytes(name: str, isa: str) -> None:
    """Into the middle one of three blocks of zeros; nothing else is written."""
    golden = load(name)
    static = golden["static_scale"]
    scales = {
        tensor: None
        if static is None
        else TensorScale(torch.tensor(static[tensor]), golden["dynamic"])
        for tensor in "kv"
    }
    k_format, v_format = (
        resolve_format(golden["kv_cache_dtype"], torch.float32, scales[tensor]) for tensor in "kv"
    )
    layout = BlockLayout(
        k_format, v_format, golden["num_kv_heads"], golden["head_size"], golden["value_size"], 16
    )
    expected = block_bytes(golden)
    assert layout.block_bytes == len(expected)
    cache = LayerCache(
        torch.zeros(3, layout.block_bytes, dtype=torch.uint8),
        layout,
        *(None if scale is None else scale.values for scale in scales.values()),
    )
    backend: Backend
    if isa == "triton":
        backend, cache = triton_backend(), moved_cache(cache)
    else:
        backend = ReferenceBackend() if isa == "reference" else CpuBackend(isa)
    slots = torch.tensor(golden["slots"]) + 16
    clipped, bad = write(
        backend, cache, torch.tensor(golden["k"]), torch.tensor(golden["v"]), slots
    )
    assert bytes(cache.blocks[1].tolist()).hex() == expected.hex()
    assert not cache.blocks[0].any()
    assert not cache.blocks[2].any()
    assert clipped == golden["clipped"]
    assert not any(bad)


def test_int8_by_hand() -> None:
    """Head 0 of int8_static: K of token t is [t, -t, t/2, 0.5, 200] and its factors are 1."""
    golden = load("int8_static")
    assert golden["k"][3][0] == [3.0, -3.0, 1.5, 0.5, 200.0]
    assert golden["static_scale"]["k"][0] == [1.0] * 5
    rows = golden["block"]["k_codes"]
    # Channels 0 and 1 of tokens 0, 1, 2, 3; slots are in reverse order: token 0 in slot 12.
    assert rows[0].endswith("03fd" + "02fe" + "01ff" + "0000" + "0000" * 3)
    # Channels 2 and 3: 1.5 -> 2, 1 -> 1, 0.5 -> 0, 0 -> 0 and 0.5 -> 0 (halves to even).
    assert rows[1].endswith("0200" + "0100" + "0000" + "0000" + "0000" * 3)
    # Channel 4 saturates at 127 = 0x7f; channel 5 is padding.
    assert rows[2] == "7f00" * 13 + "0000" * 3


def test_float16_by_hand() -> None:
    """The same numbers: 1.0 is 0x3c00, 2.0 0x4000, 3.0 0x4200, 200.0 0x5a40; bytes reversed."""
    golden = load("float16")
    rows = golden["block"]["k_codes"]
    assert rows[0].endswith("0042" + "0040" + "003c" + "0000" + "0000" * 3)
    assert rows[1].endswith("00c2" + "00c0" + "00bc" + "0080" + "0000" * 3)
    assert rows[4] == "405a" * 13 + "0000" * 3
    assert rows[5] == "0000" * 16


@pytest.mark.parametrize("name", NAMES)
def test_one_changed_number_changes_the_block(name: str) -> None:
    golden = load(name)
    golden["v"][4][0][1] += 1.0
    assert derive_block(golden) != golden["block"]
