"""Formats, caches and batches that the tests of kernels and storage share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tightkv.formats import BlockLayout, CodeType, Granularity, TensorFormat
from tightkv.formats.base import CODE_TYPES
from tightkv.kernels import AttentionBatch, Backend, LayerCache, reshape_and_cache
from tightkv.kernels.cpu import CpuBackend, available_isas

ISAS = available_isas()
NAN_BYTE = 0xFF
"""Fills a NaN of every type of codes that has one."""


def tensor_format(name: str) -> TensorFormat:
    """Such as "int8", "int8+dynamic" or "int8+channel+dynamic": a code and its scales."""
    code, *scales = name.split("+")
    static = [Granularity(scale) for scale in scales if scale != "dynamic"]
    return TensorFormat(
        name, CODE_TYPES[code], dynamic="dynamic" in scales, static=static[0] if static else None
    )


def static_factors(
    tensor_format: TensorFormat, num_kv_heads: int, size: int, generator: torch.Generator
) -> torch.Tensor | None:
    """Factors fit for K and V ~ N(0, 1), float32 `[num_kv_heads, size]`."""
    if tensor_format.static is None:
        return None
    shape = {
        Granularity.TENSOR: (1, 1),
        Granularity.HEAD: (num_kv_heads, 1),
        Granularity.CHANNEL: (num_kv_heads, size),
    }[tensor_format.static]
    spread = 0.5 + torch.rand(shape, generator=generator)
    step = 1.0 if tensor_format.dynamic else 5.0 / tensor_format.code.max_value
    return (spread * step).expand(num_kv_heads, size).contiguous()


def new_cache(layout: BlockLayout, num_blocks: int, seed: int = 0) -> LayerCache:
    """Blocks of zeros, with static factors where the formats have some."""
    generator = torch.Generator().manual_seed(seed)
    return LayerCache(
        torch.zeros(num_blocks, layout.stride, dtype=torch.uint8),
        layout,
        static_factors(layout.k_format, layout.num_kv_heads, layout.head_size, generator),
        static_factors(layout.v_format, layout.num_kv_heads, layout.value_size, generator),
    )


def write(
    backend: Backend,
    cache: LayerCache,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[list[int], list[bool]]:
    """Store K and V, given on the CPU; returns the clip counts and the bad tokens."""
    device = cache.blocks.device
    clip_counts = torch.zeros(2, dtype=torch.int64, device=device)
    bad_tokens = torch.zeros(len(slot_mapping), dtype=torch.bool, device=device)
    key, value, slots = key.to(device), value.to(device), slot_mapping.to(device)
    reshape_and_cache(backend, cache, key, value, slots, clip_counts, bad_tokens)
    return clip_counts.tolist(), bad_tokens.tolist()


@dataclass(frozen=True)
class Scene:
    """A filled cache, and queries of a batch over it."""

    cache: LayerCache
    query: torch.Tensor
    batch: AttentionBatch

    @property
    def tolerance(self) -> float:
        layout = self.cache.layout
        return max(layout.k_format.tolerance, layout.v_format.tolerance)


def extreme_values(code_name: str) -> torch.Tensor:
    """What rounding, saturating and flushing could get wrong."""
    code = CODE_TYPES[code_name]
    clip_at = min(code.clip_at, 3.4028234663852886e38)
    special = [0.0, 1e-45, 1e-40, 2.0**-126, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14, 2.0**-15]
    special += [2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-16, 2.0**-17, 3 * 2.0**-17]
    special += [0.5, 1.5, 2.5, 126.5, 127.0, 127.5, 1.0625, 1.1875, 1.125, 1.375]
    special += [code.max_value, clip_at, 65504.0, 65520.0, 1e10, 1e30, 3.4028234663852886e38]
    x = torch.tensor(special)
    x = torch.cat([x, torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(1e9))])
    return torch.cat([x, -x])


def values_and_midpoints(code: CodeType) -> torch.Tensor:
    """All finite values of a narrow float type, all midpoints, and the midpoints' neighbours."""
    bits = 8 * code.num_bytes
    integers = torch.arange(2 ** (bits - 1), dtype=torch.int32)
    codes = integers.to(torch.uint8 if bits == 8 else torch.int16).view(code.dtype)
    values = codes.float()
    values = values[values.isfinite()]
    middle = (values[:-1].double() + values[1:].double()).mul(0.5).float()
    above = torch.nextafter(middle, torch.tensor(float("inf")))
    below = torch.nextafter(middle, torch.tensor(0.0))
    x = torch.cat([values, middle, above, below])
    return torch.cat([x, -x])


def finite_codes(code: CodeType) -> torch.Tensor:
    """Every bit pattern of a finite code (of 32-bit ones some), as the code type."""
    bits = 8 * code.num_bytes
    if bits == 32:
        patterns = torch.randint(-(2**31), 2**31, (65536,)).int()
    else:
        patterns = torch.arange(2**bits).to(torch.uint8 if bits == 8 else torch.int16)
    codes = patterns.view(code.dtype)
    return codes[codes.float().isfinite()]


def make_batch(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_table: torch.Tensor
) -> AttentionBatch:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return AttentionBatch(starts, torch.tensor(seq_lens, dtype=torch.int32), block_table)


def make_scene(
    *,
    k: str = "float32",
    v: str = "float32",
    lengths: Sequence[tuple[int, int]] = ((1, 40),),
    num_kv_heads: int = 2,
    group: int = 2,
    head_size: int = 64,
    value_size: int | None = None,
    block_size: int = 16,
    seed: int = 0,
    ordered: bool = False,
    garbage: bool = False,
) -> Scene:
    """Sequences of N(0, 1) in a cache.

    Args:
        k: format of K, see `tensor_format`.
        v: format of V.
        lengths: queries and tokens of each sequence.
        num_kv_heads: KV heads.
        group: query heads of a KV head.
        head_size: channels of K.
        value_size: channels of V, by default as many.
        block_size: tokens of a block.
        seed: of everything random but the order of the blocks.
        ordered: whether block ids ascend; else they are shuffled.
        garbage: whether slots behind the last token hold large codes instead of zeros.
    """
    generator = torch.Generator().manual_seed(seed)
    value_size = head_size if value_size is None else value_size
    layout = BlockLayout(
        tensor_format(k), tensor_format(v), num_kv_heads, head_size, value_size, block_size
    )
    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    num_blocks = sum(counts) + 1
    cache = new_cache(layout, num_blocks, seed)
    backend = CpuBackend(ISAS[0])
    if garbage:
        slots = torch.arange(num_blocks * block_size)
        key = 1e4 * torch.randn(len(slots), num_kv_heads, head_size, generator=generator)
        value = 1e4 * torch.randn(len(slots), num_kv_heads, value_size, generator=generator)
        write(backend, cache, key, value, slots)
    ids = torch.arange(num_blocks) if ordered else torch.randperm(num_blocks, generator=generator)
    block_table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    data = torch.Generator().manual_seed(seed + 1)
    queries, first = [], 0
    for row, ((query_len, seq_len), count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = ids[first : first + count]
        first += count
        block_table[row, :count] = blocks
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:seq_len]
        key = torch.randn(seq_len, num_kv_heads, head_size, generator=data)
        value = torch.randn(seq_len, num_kv_heads, value_size, generator=data)
        write(backend, cache, key, value, slots)
        queries.append(
            torch.randn(query_len, num_kv_heads * group, head_size, generator=data),
        )
    batch = make_batch(
        [query_len for query_len, _ in lengths], [seq_len for _, seq_len in lengths], block_table
    )
    return Scene(cache, torch.cat(queries), batch)


def without_passed_blocks(scene: Scene, window: int) -> Scene:
    """The scene with the blocks that no query sees given to somebody who fills them with NaN.

    They have id 0 in the block table, as a sequence leaves them when it gives them back.
    """
    layout, batch = scene.cache.layout, scene.batch
    blocks = torch.cat([scene.cache.blocks[:1], scene.cache.blocks])
    table = batch.block_table + 1
    blocks[0] = NAN_BYTE
    num_queries = batch.query_start_loc.diff()
    for row, first_query in enumerate((batch.seq_lens - num_queries).tolist()):
        passed = max(0, first_query - window + 1) // layout.block_size
        blocks[table[row, :passed].long()] = NAN_BYTE
        table[row, :passed] = 0
    cache = replace(scene.cache, blocks=blocks)
    return replace(scene, cache=cache, batch=replace(batch, block_table=table))


def in_pages(cache: LayerCache) -> LayerCache:
    """The same blocks, each in a page between other layers' bytes, which are NaN."""
    layout = replace(cache.layout, page_bytes=cache.layout.block_bytes + 192, k_offset=128)
    pages = torch.full((len(cache.blocks), layout.stride), NAN_BYTE, dtype=torch.uint8)
    pages[:, layout.k_offset : layout.k_offset + layout.block_bytes] = cache.blocks
    return replace(cache, blocks=pages, layout=layout)
