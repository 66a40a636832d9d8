"""Times of the Triton kernels and of PyTorch's attention on the same shapes.

Calls are replayed from CUDA graphs of several whose blocks lie in different places, so that the L2
cache does not hold them. `gb_per_s` are the bytes of codes and dynamic scales that a call reads,
`share_of_copy` is that over the bytes per second that a copy within the device reads and writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from benchmarks.gpu.clock import Budget, Clock
from benchmarks.gpu.formats import BLOCK_SIZE, FORMATS
from torch.nn.attention.flex_attention import flex_attention

from tightkv.formats.layout import BlockLayout
from tightkv.kernels.arguments import AttentionBatch, AttentionParams, LayerCache
from tightkv.kernels.triton import TritonBackend

Heads = tuple[int, int, int]
"""Query heads, KV heads, head size."""
Point = dict[str, object]

TIMED = ("float16", "int8 static", "int8 per token", "fp8_e4m3 static")
TORCH, FLEX = "torch float16", "flex_attention float16"


@dataclass(frozen=True)
class KernelSizes:
    """What is timed.

    Attributes:
        heads: of the layers.
        batches: sequences of a decode.
        contexts: tokens of each, the ones that bars are about first.
        prompts: tokens of a prefill.
        folded: batch and context with which the cost of static factors is measured.
        cold_bytes: what calls that take turns read together: more than any L2 cache holds.
    """

    heads: tuple[Heads, ...] = ((32, 8, 128), (64, 8, 128))
    batches: tuple[int, ...] = (1, 16, 64)
    contexts: tuple[int, ...] = (16384, 65536, 2048, 32768, 8192, 4096)
    prompts: tuple[int, ...] = (2048, 8192)
    folded: tuple[int, int] = (16, 16384)
    cold_bytes: int = 2**28


def random_cache(layout: BlockLayout, num_blocks: int, device: torch.device) -> LayerCache:
    """Bytes that are finite numbers in every format, and as scales, too."""
    blocks = torch.randint(
        0, 0x38, (num_blocks, layout.block_bytes), dtype=torch.uint8, device=device
    )
    factors = torch.full((layout.num_kv_heads, layout.head_size), 0.01, device=device)
    scales = (factors if f.static else None for f in (layout.k_format, layout.v_format))
    return LayerCache(blocks, layout, *scales)


def time_decode(
    backend: TritonBackend,
    clock: Clock,
    name: str,
    heads: Heads,
    batch: int,
    context: int,
    cold_bytes: int,
) -> float:
    """Seconds of a call."""
    num_heads, num_kv_heads, size = heads
    device = backend.device
    layout = BlockLayout(FORMATS[name], FORMATS[name], num_kv_heads, size, size, BLOCK_SIZE)
    width = -(-context // BLOCK_SIZE)
    copies = max(1, min(16, cold_bytes // (batch * width * layout.block_bytes)))
    cache = random_cache(layout, copies * batch * width, device)
    ids = torch.randperm(len(cache.blocks), device=device).int().view(copies, batch, width)
    starts = torch.arange(batch + 1, device=device).int()
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    query = torch.randn(batch, num_heads, size, device=device, dtype=torch.bfloat16)
    params = AttentionParams(1 / math.sqrt(size))

    def call_on(table: torch.Tensor) -> Callable[[], object]:
        one = AttentionBatch(starts, seq_lens, table.contiguous(), 1)
        return lambda: backend.paged_attention(query, cache, one, params)

    return clock.seconds([call_on(table) for table in ids])


def time_prefill(
    backend: TritonBackend, clock: Clock, name: str, heads: Heads, tokens: int
) -> float:
    """Seconds of a whole prompt."""
    num_heads, num_kv_heads, size = heads
    device = backend.device
    layout = BlockLayout(FORMATS[name], FORMATS[name], num_kv_heads, size, size, BLOCK_SIZE)
    width = -(-tokens // BLOCK_SIZE)
    cache = random_cache(layout, width, device)
    batch = AttentionBatch(
        torch.tensor([0, tokens], dtype=torch.int32, device=device),
        torch.tensor([tokens], dtype=torch.int32, device=device),
        torch.randperm(width, device=device).int()[None],
        tokens,
    )
    query = torch.randn(tokens, num_heads, size, device=device, dtype=torch.bfloat16)
    params = AttentionParams(1 / math.sqrt(size))
    return clock.seconds([lambda: backend.paged_attention(query, cache, batch, params)])


def time_torch(
    clock: Clock,
    device: torch.device,
    heads: Heads,
    batch: int,
    queries: int,
    context: int,
    *,
    flex: bool = False,
) -> float:
    """Seconds of scaled_dot_product_attention, or flex_attention, over contiguous float16.

    flex_attention gets no mask: of a prompt it computes twice what a causal one needs.
    """
    num_heads, num_kv_heads, size = heads
    query = torch.randn(batch, num_heads, queries, size, device=device, dtype=torch.float16)
    key = torch.randn(batch, num_kv_heads, context, size, device=device, dtype=torch.float16)
    value = torch.randn_like(key)
    if flex:
        compiled = torch.compile(flex_attention) if device.type == "cuda" else flex_attention
        return clock.seconds([lambda: compiled(query, key, value, enable_gqa=True)] * 4)
    attention = torch.nn.functional.scaled_dot_product_attention
    return clock.seconds(
        [lambda: attention(query, key, value, is_causal=queries > 1, enable_gqa=True)] * 4
    )


def prefill_times(
    backend: TritonBackend, clock: Clock, sizes: KernelSizes, budget: Budget
) -> Iterator[Point]:
    for tokens in sizes.prompts:
        for heads in sizes.heads:
            for name in (*TIMED, TORCH):
                if not budget.has_time_for((heads, tokens, name)):
                    continue
                if name == TORCH:
                    seconds = time_torch(clock, backend.device, heads, 1, tokens, tokens)
                else:
                    seconds = time_prefill(backend, clock, name, heads, tokens)
                flops = 4 * heads[0] * heads[2] * tokens * (tokens + 1) / 2
                point = {"format": name, "heads": heads, "tokens": tokens, "ms": 1e3 * seconds}
                yield point | {"tflops": flops / seconds / 1e12}


def decode_times(
    backend: TritonBackend, clock: Clock, sizes: KernelSizes, copy_rate: float, budget: Budget
) -> Iterator[Point]:
    for heads, batch, context in _decode_points(sizes, backend.device):
        if not budget.has_time_for((heads, batch, context)):
            continue
        for name in (*TIMED, TORCH):
            if name == TORCH:
                seconds = time_torch(clock, backend.device, heads, batch, 1, context)
            else:
                seconds = time_decode(backend, clock, name, heads, batch, context, sizes.cold_bytes)
            yield _decode_point(name, heads, batch, context, seconds, copy_rate)


def flex_times(
    backend: TritonBackend, clock: Clock, sizes: KernelSizes, copy_rate: float, budget: Budget
) -> Iterator[Point]:
    """One decode per shape of heads: each shape is compiled anew, which takes long."""
    batch, context = sizes.folded
    for heads in sizes.heads:
        if budget.has_time_for((heads, batch, context)):
            seconds = time_torch(clock, backend.device, heads, batch, 1, context, flex=True)
            yield _decode_point(FLEX, heads, batch, context, seconds, copy_rate)


def folding_times(
    backend: TritonBackend, clock: Clock, sizes: KernelSizes, budget: Budget
) -> Iterator[Point]:
    """What factors per channel cost: int8 with and without, in turns."""
    batch, context = sizes.folded
    for heads in sizes.heads:
        if not budget.has_time_for((heads, batch, context)):
            continue
        best = {"int8": math.inf, "int8 static": math.inf}
        for _ in range(3):
            for name in best:
                seconds = time_decode(backend, clock, name, heads, batch, context, sizes.cold_bytes)
                best[name] = min(best[name], seconds)
        point: Point = {"heads": heads, "batch": batch, "context": context}
        point |= {"us_without": 1e6 * best["int8"], "us_with": 1e6 * best["int8 static"]}
        yield point | {"cost": best["int8 static"] / best["int8"] - 1}


def _decode_points(sizes: KernelSizes, device: torch.device) -> Iterator[tuple[Heads, int, int]]:
    """Heads, batch and context of those that fit the memory."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**32
    for context in sizes.contexts:
        for batch in sizes.batches:
            for heads in sizes.heads:
                if 4 * heads[1] * heads[2] * batch * context < free / 3:
                    yield heads, batch, context


def _decode_point(
    name: str, heads: Heads, batch: int, context: int, seconds: float, copy_rate: float
) -> Point:
    bits = FORMATS[name].effective_bits(heads[2]) if name in FORMATS else 16
    rate = 2 * heads[1] * heads[2] * batch * context * bits / 8 / seconds
    point: Point = {"format": name, "heads": heads, "batch": batch, "context": context}
    return point | {"us": 1e6 * seconds, "gb_per_s": rate / 1e9, "share_of_copy": rate / copy_rate}
