"""Whether the Triton kernels are right on a device, against the reference on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from benchmarks.gpu.formats import BLOCK_SIZE, FORMATS

from tightkv.formats.base import TensorFormat
from tightkv.formats.layout import BlockLayout
from tightkv.kernels import reference
from tightkv.kernels.arguments import AttentionBatch, AttentionParams, LayerCache
from tightkv.kernels.triton import TritonBackend

Lengths = tuple[tuple[int, int], ...]
"""Queries and tokens of each sequence."""


@dataclass(frozen=True)
class Scene:
    """A filled cache on the CPU, and queries."""

    cache: LayerCache
    query: torch.Tensor
    batch: AttentionBatch
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor


def make_scene(tensor_format: TensorFormat, lengths: Lengths) -> Scene:
    """Sequences of N(0, 1), their blocks in random order; written by the reference."""
    heads, size = 2, 128
    generator = torch.Generator().manual_seed(1)
    layout = BlockLayout(tensor_format, tensor_format, heads, size, size, BLOCK_SIZE)
    counts = [-(-tokens // BLOCK_SIZE) for _, tokens in lengths]
    ids = torch.randperm(sum(counts), generator=generator)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    slots = []
    for row, (count, (_, tokens)) in enumerate(zip(counts, lengths, strict=True)):
        blocks, ids = ids[:count], ids[count:]
        table[row, :count] = blocks
        slots.append((blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:tokens])
    factors = None
    if tensor_format.static is not None:
        step = 1.0 if tensor_format.dynamic else 5.0 / tensor_format.code.max_value
        factors = step * (0.5 + torch.rand(heads, size, generator=generator))
    num_blocks = sum(counts)
    blocks = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
    cache = LayerCache(blocks, layout, factors, factors)
    slot_mapping = torch.cat(slots)
    key, value = torch.randn(2, len(slot_mapping), heads, size, generator=generator)
    starts = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), 4 * heads, size, generator=generator)
    seq_lens = torch.tensor([tokens for _, tokens in lengths], dtype=torch.int32)
    batch = AttentionBatch(starts, seq_lens, table)
    return Scene(cache, query, batch, key, value, slot_mapping)


def on(device: torch.device, cache: LayerCache) -> LayerCache:
    scales = (None if s is None else s.to(device) for s in (cache.k_scale, cache.v_scale))
    return LayerCache(cache.blocks.clone().to(device), cache.layout, *scales)


def batch_on(device: torch.device, batch: AttentionBatch) -> AttentionBatch:
    return AttentionBatch(
        batch.query_start_loc.to(device), batch.seq_lens.to(device), batch.block_table.to(device)
    )


def check_format(backend: TritonBackend, name: str, lengths: Lengths) -> dict[str, object]:
    """Bytes, attention's error, and a decode of the last row of each sequence alone."""
    device, scene = backend.device, make_scene(FORMATS[name], lengths)
    cache = on(device, scene.cache)
    counts = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    flags = [torch.zeros(len(scene.slots), dtype=torch.bool) for _ in range(2)]
    reference.reshape_and_cache(
        scene.cache, scene.key, scene.value, scene.slots, counts[0], flags[0]
    )
    counts[1], flags[1] = counts[1].to(device), flags[1].to(device)
    key, value, slots = (x.to(device) for x in (scene.key, scene.value, scene.slots))
    backend.reshape_and_cache(cache, key, value, slots, counts[1], flags[1])
    params = AttentionParams(1 / math.sqrt(128))
    query, batch = scene.query.to(device), batch_on(device, scene.batch)
    together = backend.paged_attention(query, cache, batch, params)
    expected = reference.paged_attention(scene.query, scene.cache, scene.batch, params)
    error = ((together.cpu() - expected).abs().max() / expected.abs().max()).item()
    alone = True
    for row, end in enumerate(scene.batch.query_start_loc[1:].tolist()):
        single = AttentionBatch(
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            batch.seq_lens[row : row + 1],
            batch.block_table[row : row + 1],
        )
        decoded = backend.paged_attention(query[end - 1 : end], cache, single, params)
        alone &= torch.equal(decoded[0], together[end - 1])
    tolerance = FORMATS[name].tolerance
    bytes_equal = torch.equal(cache.blocks.cpu(), scene.cache.blocks) and torch.equal(
        counts[1].cpu(), counts[0]
    )
    return {
        "bytes_equal": bytes_equal,
        "error": error,
        "tolerance": tolerance,
        "row_alone_equal": alone,
        "passed": bytes_equal and alone and error <= tolerance,
    }


def check_codes(backend: TritonBackend, name: str) -> bool:
    """Whether each one-byte code comes out exactly as V of a sequence of one token."""
    code = FORMATS[name].code
    codes = torch.arange(256).to(torch.uint8).view(code.dtype)
    codes = torch.where(codes.float().isfinite(), codes.float(), 0.0).to(code.dtype)
    layout = BlockLayout(
        FORMATS["float16"], replace(FORMATS[name], static=None, dynamic=False), 1, 64, 256, 16
    )
    blocks = torch.zeros(1, layout.block_bytes, dtype=torch.uint8)
    cache = LayerCache(blocks, layout)
    stored = layout.v_codes(blocks)  # [block, head, tile, channel tile, token / i, channel, i]
    stored[0, 0, 0, :, 0, :, 0] = codes.view(stored.dtype).view(16, 16)
    one = torch.ones(1, dtype=torch.int32)
    batch = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32), one, torch.zeros_like(one)[None]
    )
    device = backend.device
    out = backend.paged_attention(
        torch.zeros(1, 1, 64, device=device),
        on(device, cache),
        batch_on(device, batch),
        AttentionParams(1.0),
    )
    return torch.equal(out.flatten().cpu(), codes.float())


def run_checks(backend: TritonBackend, lengths: Lengths) -> dict[str, object]:
    """Each check of each format, and under "passed" whether all passed."""
    results: dict[str, object] = {}
    passed = True
    for name in FORMATS:
        results[name] = result = check_format(backend, name, lengths)
        passed &= bool(result["passed"])
        print(f"{name}: {result}", flush=True)
    for name in ("int8 static", "fp8_e4m3 static", "fp8_e5m2"):
        is_exact = check_codes(backend, name)
        results[f"codes of {name}"] = is_exact
        passed &= is_exact
        print(f"every code of {name} is read exactly: {is_exact}", flush=True)
    return results | {"passed": passed}
