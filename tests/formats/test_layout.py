"""Where bytes lie: offsets counted by hand, in plain loops, against the views of BlockLayout."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch

from cache_cases import tensor_format
from tightkv.formats import BlockLayout
from tightkv.formats.base import CODE_TYPES

FORMATS = ["float32", "float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2", "int8+dynamic"]
NUM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
SHAPES = [(16, 1, 64, 64), (16, 2, 5, 6), (32, 2, 33, 17), (48, 3, 80, 128)]


def align(num_bytes: int) -> int:
    while num_bytes % 64:
        num_bytes += 1
    return num_bytes


def sections(
    k: str, v: str, block_size: int, heads: int, head_size: int, value_size: int
) -> list[int]:
    """Bytes of K codes and V codes, up to the next cache line, K scales, V scales."""
    k_channels = head_size + head_size % 2
    v_channels = -(-value_size // 16) * 16
    return [
        align(heads * block_size * k_channels * NUM_BYTES[k.split("+")[0]]),
        align(heads * block_size * v_channels * NUM_BYTES[v.split("+")[0]]),
        heads * block_size * 2 if "dynamic" in k else 0,
        heads * block_size * 2 if "dynamic" in v else 0,
    ]


@pytest.mark.parametrize("k", FORMATS)
@pytest.mark.parametrize("v", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sections(k: str, v: str, shape: tuple[int, int, int, int]) -> None:
    block_size, heads, head_size, value_size = shape
    layout = BlockLayout(
        tensor_format(k), tensor_format(v), heads, head_size, value_size, block_size
    )
    sizes = sections(k, v, block_size, heads, head_size, value_size)
    ends = list(itertools.accumulate(sizes))
    assert [layout.v_offset, layout.k_scale_offset, layout.v_scale_offset] == ends[:3]
    assert layout.block_bytes == align(ends[3])


def test_interleave_and_tile_are_what_the_picture_says() -> None:
    assert {name: code.interleave for name, code in CODE_TYPES.items()} == {
        "float32": 1,
        "float16": 1,
        "bfloat16": 1,
        "int8": 2,
        "fp8_e4m3": 1,
        "fp8_e5m2": 1,
    }
    assert {name: code.num_bytes for name, code in CODE_TYPES.items()} == NUM_BYTES


UNPACK = {"float32": "<f", "float16": "<e", "int8": "<b", "fp8_e4m3": "<B", "fp8_e5m2": "<B"}


@pytest.mark.parametrize("code", UNPACK)
@pytest.mark.parametrize("shape", [(16, 2, 5, 6), (48, 2, 6, 20)])
def test_every_code_lies_where_the_formula_says(
    code: str, shape: tuple[int, int, int, int]
) -> None:
    """K: tile, channel group, token, channel in group. V: tile, channel tile, token group, …"""
    block_size, heads, head_size, value_size = shape
    layout = BlockLayout(
        tensor_format(code), tensor_format(code), heads, head_size, value_size, block_size
    )
    blocks = torch.zeros(2, layout.block_bytes, dtype=torch.uint8)
    k, v = layout.k_codes(blocks), layout.v_codes(blocks)
    k.copy_((torch.arange(k.numel()) % 113).reshape(k.shape))
    v.copy_((torch.arange(v.numel()) % 109).reshape(v.shape))
    data = bytes(blocks.flatten().tolist())
    size, pair = NUM_BYTES[code], 2 if code == "int8" else 1
    k_channels, v_channels = head_size + head_size % 2, -(-value_size // 16) * 16
    tiles = block_size // 16

    def stored(offset: int) -> float:
        return float(struct.unpack_from(UNPACK[code], data, offset)[0])

    for block, head, token in itertools.product(range(2), range(heads), range(block_size)):
        tile, lane = divmod(token, 16)
        start = block * layout.block_bytes
        for channel in range(k_channels):
            index = (head * tiles + tile) * 16 * k_channels
            index += (channel // pair * 16 + lane) * pair + channel % pair
            view = k[block, head, tile, channel // pair, lane, channel % pair]
            assert stored(start + index * size) == view.item()
        for channel in range(v_channels):
            index = (head * tiles + tile) * 16 * v_channels + channel // 16 * 16 * 16
            index += (lane // pair * 16 + channel % 16) * pair + lane % pair
            view = v[block, head, tile, channel // 16, lane // pair, channel % 16, lane % pair]
            assert stored(start + layout.v_offset + index * size) == view.item()


def test_scales_lie_behind_the_codes() -> None:
    dynamic = tensor_format("int8+dynamic")
    layout = BlockLayout(dynamic, dynamic, 2, 5, 6, 16)
    blocks = torch.zeros(2, layout.block_bytes, dtype=torch.uint8)
    k, v = layout.k_scales(blocks), layout.v_scales(blocks)
    assert k is not None
    assert v is not None
    k[1, 1, 3], v[0, 1, 15] = 1.5, 2.5
    data = bytes(blocks.flatten().tolist())
    k_start = align(2 * 16 * 6) + align(2 * 16 * 16)
    assert struct.unpack_from("<e", data, layout.block_bytes + k_start + (16 + 3) * 2) == (1.5,)
    assert struct.unpack_from("<e", data, k_start + 64 + (16 + 15) * 2) == (2.5,)
    assert sum(byte != 0 for byte in data) == 2  # the high bytes of 0x3E00 and of 0x4100


def test_no_scales_without_a_dynamic_part() -> None:
    layout = BlockLayout(tensor_format("int8"), tensor_format("int8+dynamic"), 1, 64, 64, 16)
    blocks = torch.zeros(1, layout.block_bytes, dtype=torch.uint8)
    assert layout.k_scales(blocks) is None
    assert layout.v_scales(blocks) is not None
    assert layout.k_scale_offset == layout.v_scale_offset
