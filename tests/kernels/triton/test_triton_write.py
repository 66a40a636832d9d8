"""The write in Triton: the reference's bytes, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from cache_cases import extreme_values, new_cache, tensor_format, values_and_midpoints, write
from tightkv.formats import BlockLayout
from tightkv.formats.base import CODE_TYPES
from tightkv.kernels import LayerCache
from tightkv.kernels.ops import ReferenceBackend
from tightkv.kernels.reference import read_sequence
from triton_cases import DEVICE, moved_cache, triton_backend

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tightkv[triton]'")
# numpy, which the interpreter computes with, warns where float32 overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF, NAN = float("inf"), float("nan")
FORMATS = [
    f"{code}{scales}"
    for code, scales in itertools.product(CODE_TYPES, ("", "+dynamic", "+channel+dynamic"))
] + ["int8+tensor", "fp8_e4m3+head", "float32+channel"]


def make_layout(name: str, block_size: int = 16, size: tuple[int, int] = (33, 21)) -> BlockLayout:
    """The same format for K and V, of sizes that need padding."""
    return BlockLayout(tensor_format(name), tensor_format(name), 2, *size, block_size)


def assert_same_as_reference(
    layout: BlockLayout,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    cache: LayerCache | None = None,
) -> tuple[list[int], list[bool]]:
    num_blocks = int(slots.max()) // layout.block_size + 1
    cache = cache or new_cache(layout, num_blocks)
    on_device = moved_cache(cache)
    result = write(triton_backend(), on_device, key, value, slots)
    assert result == write(ReferenceBackend(), cache, key, value, slots)
    assert torch.equal(on_device.blocks.cpu(), cache.blocks)
    return result


@pytest.mark.parametrize("name", FORMATS)
def test_normal_and_extreme_values(name: str) -> None:
    """In slots out of order, with NaN and Inf, and extremes alone in a row of zeros."""
    generator = torch.Generator().manual_seed(1)
    x = extreme_values(name.split("+")[0])
    normal = torch.randn(20, 2, 54, generator=generator) * 2
    mixed = x[torch.randint(len(x), (20, 2, 54), generator=generator)]
    alone = torch.zeros(len(x) // 2, 2, 54)
    alone[:, 0, 3], alone[:, 1, 40] = x[::2], x[1::2]
    rows = torch.cat([normal, mixed, alone])
    rows[5, 0, 0], rows[6, 1, 32], rows[7, 0, 33], rows[8, 1, 53] = NAN, INF, -INF, NAN
    slots = torch.randperm(-(-len(rows) // 16) * 16 + 16, generator=generator)[: len(rows)]
    clipped, bad = assert_same_as_reference(
        make_layout(name), rows[..., :33], rows[..., 33:], slots
    )
    assert [token for token, is_bad in enumerate(bad) if is_bad] == [5, 6, 7, 8]
    if name in ("int8", "fp8_e4m3", "int8+dynamic"):
        assert all(clipped)


@pytest.mark.parametrize("code", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_every_code_and_midpoint(code: str) -> None:
    """All values of the type, all midpoints and their neighbours, against torch's own cast."""
    x = values_and_midpoints(CODE_TYPES[code])
    x = torch.nn.functional.pad(x, (0, -len(x) % 256)).reshape(-1, 1, 256)
    layout = BlockLayout(tensor_format(code), tensor_format(code), 1, 256, 256, 16)
    cache = moved_cache(new_cache(layout, -(-len(x) // 16)))
    assert write(triton_backend(), cache, x, x, torch.arange(len(x)))[0] == [0, 0]
    written = moved_cache(cache, torch.device("cpu"))
    k, v = read_sequence(written, torch.arange(len(cache.blocks)), len(x))
    assert torch.equal(k, x.to(CODE_TYPES[code].dtype).float())
    assert torch.equal(v, k)
    assert torch.equal(k.signbit(), x.signbit())


@pytest.mark.parametrize("name", ["float32", "fp8_e4m3", "int8+channel+dynamic"])
@pytest.mark.parametrize("block_size", [32, 48])
def test_block_sizes(name: str, block_size: int) -> None:
    slots = torch.randperm(3 * block_size)[:30]
    key, value = torch.randn(30, 2, 33), torch.randn(30, 2, 21)
    assert_same_as_reference(make_layout(name, block_size), key, value, slots)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float16", "int8+channel+dynamic", "fp8_e5m2+head"])
@pytest.mark.parametrize("size", [(64, 64), (80, 96), (112, 128), (128, 33), (1, 1), (256, 72)])
def test_head_sizes(name: str, size: tuple[int, int]) -> None:
    key, value = torch.randn(5, 2, size[0]), torch.randn(5, 2, size[1])
    slots = torch.tensor([0, 31, 16, 7, 15])
    assert_same_as_reference(make_layout(name, 16, size), key, value, slots)


def test_strided_and_narrow_inputs() -> None:
    """What a model hands over: `[heads, tokens, size]` transposed, and a slice of a fused qkv."""
    layout = make_layout("int8+channel+dynamic", 16, (32, 32))
    slots = torch.arange(20)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        key = torch.randn(2, 20, 32).to(dtype).transpose(0, 1)
        value = torch.randn(20, 6, 32).to(dtype)[:, 4:]
        assert not key.is_contiguous()
        assert not value.is_contiguous()
        assert_same_as_reference(layout, key, value, slots)


@pytest.mark.parametrize("name", ["float16", "int8+dynamic", "fp8_e4m3+channel+dynamic"])
def test_only_the_given_slots_are_touched_and_padding_is_zero(name: str) -> None:
    """In blocks that hold something else; K and V of unlike formats."""
    alone = BlockLayout(tensor_format(name), tensor_format("int8+head"), 2, 33, 21, 32)
    in_page = replace(alone, page_bytes=alone.block_bytes + 192, k_offset=128)
    slots = torch.tensor([40, 95, 0])
    for layout in (alone, in_page):
        cache = new_cache(layout, 3)
        cache.blocks.fill_(0x33)
        key, value = torch.randn(3, 2, 33), torch.randn(3, 2, 21)
        assert_same_as_reference(layout, key, value, slots, cache)


def test_counts_are_added_and_flags_are_kept() -> None:
    layout = BlockLayout(tensor_format("int8"), tensor_format("fp8_e4m3"), 1, 4, 4, 16)
    cache = moved_cache(new_cache(layout, 1))
    clip_counts = torch.tensor([10, 20], device=DEVICE)
    bad_tokens = torch.tensor([True, False, False], device=DEVICE)
    key = torch.zeros(3, 1, 4, device=DEVICE)
    key[1, 0, :3] = torch.tensor([127.5, -127.5, 127.49])
    value = torch.zeros(3, 1, 4, device=DEVICE)
    value[2, 0, 0], value[2, 0, 1] = 464.0, NAN
    slots = torch.arange(3, device=DEVICE)
    triton_backend().reshape_and_cache(cache, key, value, slots, clip_counts, bad_tokens)
    assert clip_counts.tolist() == [12, 21]
    assert bad_tokens.tolist() == [True, False, True]


def test_slots_outside_the_cache_are_left_out() -> None:
    """The host does not know them, so there is no error; nothing else is written or counted."""
    layout = make_layout("int8")
    cache = moved_cache(new_cache(layout, 2))
    slots = torch.tensor([-1, 32, 2**40])
    result = write(
        triton_backend(), cache, torch.full((3, 2, 33), 200.0), torch.full((3, 2, 21), NAN), slots
    )
    assert result == ([0, 0], [False] * 3)
    assert not cache.blocks.any()


def test_no_tokens() -> None:
    cache = moved_cache(new_cache(make_layout("int8+dynamic"), 1))
    slots = torch.zeros(0, dtype=torch.int64)
    result = write(triton_backend(), cache, torch.zeros(0, 2, 33), torch.zeros(0, 2, 21), slots)
    assert result == ([0, 0], [])
    assert not cache.blocks.any()
