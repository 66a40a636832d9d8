"""The oracle ladder of the write: reference = every instruction set, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from cache_cases import (
    ISAS,
    extreme_values,
    new_cache,
    tensor_format,
    values_and_midpoints,
    write,
)
from tightkv.formats import BlockLayout, quantize
from tightkv.formats.base import CODE_TYPES
from tightkv.kernels import LayerCache
from tightkv.kernels.cpu import CpuBackend
from tightkv.kernels.ops import ReferenceBackend
from tightkv.kernels.reference import read_sequence

INF, NAN = float("inf"), float("nan")
SCALES = ["", "+tensor", "+head", "+channel"]
FORMATS = [
    f"{code}{static}{dynamic}"
    for code, static, dynamic in itertools.product(CODE_TYPES, SCALES, ("", "+dynamic"))
]


def make_layout(name: str, block_size: int = 16, size: tuple[int, int] = (33, 21)) -> BlockLayout:
    """The same format for K and V, of sizes that need padding."""
    return BlockLayout(tensor_format(name), tensor_format(name), 2, *size, block_size)


def assert_same_as_reference(
    isa: str,
    layout: BlockLayout,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    cache: LayerCache | None = None,
) -> tuple[list[int], list[bool]]:
    num_blocks = int(slots.max()) // layout.block_size + 1
    cache = cache or new_cache(layout, num_blocks)
    expected = LayerCache(cache.blocks.clone(), layout, cache.k_scale, cache.v_scale)
    result = write(CpuBackend(isa), cache, key, value, slots)
    assert result == write(ReferenceBackend(), expected, key, value, slots)
    assert torch.equal(cache.blocks, expected.blocks)
    return result


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_normal_values(isa: str, name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(7 * 16, generator=generator)[:71]
    key = torch.randn(71, 2, 33, generator=generator) * 2
    value = torch.randn(71, 2, 21, generator=generator) * 2
    assert_same_as_reference(isa, make_layout(name), key, value, slots)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_extreme_values(isa: str, name: str) -> None:
    """Whole rows of them, and each alone in a row, where it makes the dynamic scale."""
    generator = torch.Generator().manual_seed(2)
    x = extreme_values(name.split("+")[0])
    rows = x[torch.randint(len(x), (40, 2, 54), generator=generator)]
    alone = torch.zeros(len(x), 2, 54)
    alone[:, 0, 3] = alone[:, 1, 30] = x
    rows = torch.cat([rows, alone])
    rows[5, 0, 0], rows[6, 1, 32], rows[7, 0, 33], rows[8, 1, 53] = NAN, INF, -INF, NAN
    slots = torch.arange(len(rows))
    clipped, bad = assert_same_as_reference(
        isa, make_layout(name), rows[..., :33], rows[..., 33:], slots
    )
    assert [token for token, is_bad in enumerate(bad) if is_bad] == [5, 6, 7, 8]
    if name in ("int8", "fp8_e4m3", "int8+dynamic"):
        assert all(clipped)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("code", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_every_code_and_midpoint(isa: str, code: str) -> None:
    """All values of the type, all midpoints and their neighbours, against torch's own cast."""
    code_type = CODE_TYPES[code]
    x = values_and_midpoints(code_type)
    x = torch.nn.functional.pad(x, (0, -len(x) % 512)).reshape(-1, 1, 512)
    layout = BlockLayout(tensor_format(code), tensor_format(code), 1, 512, 512, 16)
    slots = torch.arange(len(x))
    cache = new_cache(layout, -(-len(x) // 16))
    assert write(CpuBackend(isa), cache, x, x, slots)[0] == [0, 0]
    table = torch.arange(len(cache.blocks))
    k, v = read_sequence(cache, table, len(x))
    assert torch.equal(k, x.to(code_type.dtype).float())
    assert torch.equal(v, k)
    assert torch.equal(k.signbit(), x.signbit())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["float32", "fp8_e4m3", "int8", "int8+channel+dynamic"])
@pytest.mark.parametrize("block_size", [16, 32, 48, 64])
def test_block_sizes(isa: str, name: str, block_size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    slots = torch.randperm(4 * block_size, generator=generator)[: 3 * block_size]
    key = torch.randn(len(slots), 2, 33, generator=generator)
    value = torch.randn(len(slots), 2, 21, generator=generator)
    assert_same_as_reference(isa, make_layout(name, block_size), key, value, slots)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["float16", "int8+channel+dynamic", "fp8_e5m2+head"])
@pytest.mark.parametrize("size", [(64, 64), (80, 96), (128, 33), (1, 1), (256, 72), (1024, 1024)])
def test_head_sizes(isa: str, name: str, size: tuple[int, int]) -> None:
    key, value = torch.randn(5, 2, size[0]), torch.randn(5, 2, size[1])
    slots = torch.tensor([0, 31, 16, 7, 15])
    assert_same_as_reference(isa, make_layout(name, 16, size), key, value, slots)


@pytest.mark.parametrize("isa", ISAS)
def test_strided_inputs(isa: str) -> None:
    """What a model hands over: `[heads, tokens, size]` transposed, and a slice of a fused qkv."""
    layout = make_layout("int8+channel+dynamic", 16, (32, 32))
    slots = torch.arange(20)
    key = torch.randn(2, 20, 32).transpose(0, 1)
    fused = torch.randn(20, 6, 32)
    value = fused[:, 4:]
    assert not key.is_contiguous()
    assert not value.is_contiguous()
    assert_same_as_reference(isa, layout, key, value, slots)
    strided, packed = new_cache(layout, 2), new_cache(layout, 2)
    write(CpuBackend(isa), strided, key, value, slots)
    write(CpuBackend(isa), packed, key.contiguous(), value.contiguous(), slots)
    assert torch.equal(strided.blocks, packed.blocks)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs(isa: str, dtype: torch.dtype) -> None:
    layout = make_layout("int8+dynamic")
    key, value = torch.randn(20, 2, 33).to(dtype), torch.randn(20, 2, 21).to(dtype)
    assert_same_as_reference(isa, layout, key, value, torch.arange(20))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["float16", "int8", "int8+dynamic", "fp8_e4m3+channel+dynamic"])
def test_only_the_given_slots_are_touched(isa: str, name: str) -> None:
    layout = make_layout(name, 32)
    cache = new_cache(layout, 3)
    write(CpuBackend(isa), cache, torch.randn(96, 2, 33), torch.randn(96, 2, 21), torch.arange(96))
    before = read_sequence(cache, torch.arange(3), 96)
    slots = torch.tensor([40, 95, 0])
    write(CpuBackend(isa), cache, torch.ones(3, 2, 33), torch.ones(3, 2, 21), slots)
    after = read_sequence(cache, torch.arange(3), 96)
    for old, new in zip(before, after, strict=True):
        changed = (old != new).flatten(1).any(dim=1).nonzero().flatten()
        assert changed.tolist() == [0, 40, 95]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["int8+channel", "fp8_e4m3+dynamic", "float16"])
def test_padding_is_zero(isa: str, name: str) -> None:
    """Also where the block held something else before: its padding is multiplied with."""
    layout = make_layout(name)
    cache = new_cache(layout, 1)
    cache.blocks.fill_(0x33)
    write(CpuBackend(isa), cache, torch.randn(16, 2, 33), torch.randn(16, 2, 21), torch.arange(16))
    k = layout.k_codes(cache.blocks).permute(0, 1, 2, 4, 3, 5).flatten(4)
    v = layout.v_codes(cache.blocks).permute(0, 1, 2, 4, 6, 3, 5).flatten(5)
    assert not k[..., 33:].any()
    assert not v[..., 21:].any()
    assert k[..., :33].any()


@pytest.mark.parametrize("isa", ISAS)
def test_thread_counts(isa: str) -> None:
    layout = make_layout("int8+channel")
    key, value = torch.randn(100, 2, 33) * 3, torch.randn(100, 2, 21) * 3
    value[77, 1, 2] = NAN
    before = torch.get_num_threads()
    results, blocks = [], []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            cache = new_cache(layout, 7)
            results.append(write(CpuBackend(isa), cache, key, value, torch.arange(100)))
            blocks.append(cache.blocks)
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]
    assert torch.equal(blocks[0], blocks[1])
    assert torch.equal(blocks[0], blocks[2])
    assert results[0][0][0] > 0


@pytest.mark.parametrize("isa", [*ISAS, "reference"])
def test_counts_are_added_and_flags_are_kept(isa: str) -> None:
    backend = ReferenceBackend() if isa == "reference" else CpuBackend(isa)
    layout = BlockLayout(tensor_format("int8"), tensor_format("fp8_e4m3"), 1, 4, 4, 16)
    cache = new_cache(layout, 1)
    clip_counts = torch.tensor([10, 20])
    bad_tokens = torch.tensor([True, False, False])
    key = torch.zeros(3, 1, 4)
    key[1, 0, :3] = torch.tensor([127.5, -127.5, 127.49])
    value = torch.zeros(3, 1, 4)
    value[2, 0, 0], value[2, 0, 1] = 464.0, NAN
    backend.reshape_and_cache(cache, key, value, torch.arange(3), clip_counts, bad_tokens)
    assert clip_counts.tolist() == [12, 21]
    assert bad_tokens.tolist() == [True, False, True]


@pytest.mark.parametrize("isa", [*ISAS, "reference"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8+channel+dynamic", "fp8_e4m3+head"])
def test_what_is_read_back_is_what_quantize_made(isa: str, name: str) -> None:
    """Ties the layout to `quantize` without the reference's own scatter."""
    backend = ReferenceBackend() if isa == "reference" else CpuBackend(isa)
    layout = make_layout(name, 32)
    cache = new_cache(layout, 3)
    key, value = torch.randn(40, 2, 33), torch.randn(40, 2, 21)
    table = torch.tensor([2, 0])
    slots = torch.tensor([int(table[t // 32]) * 32 + t % 32 for t in range(40)])
    write(backend, cache, key, value, slots)
    read = read_sequence(cache, table, 40)
    for x, got, factors in zip((key, value), read, (cache.k_scale, cache.v_scale), strict=True):
        made = quantize(x, tensor_format(name), factors)
        expected = made.codes.float()
        if factors is not None:
            expected = expected * factors
        if made.scales is not None:
            expected = expected * made.scales.float()[..., None]
        assert torch.equal(got, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_no_tokens(isa: str) -> None:
    cache = new_cache(make_layout("int8+dynamic"), 1)
    slots = torch.zeros(0, dtype=torch.int64)
    result = write(CpuBackend(isa), cache, torch.zeros(0, 2, 33), torch.zeros(0, 2, 21), slots)
    assert result == ([0, 0], [])
    assert not cache.blocks.any()
