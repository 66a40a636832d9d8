"""The Triton kernels on a GPU: whether they are right, then how fast; the last line is one JSON.

    benchmarks/gpu/run.sh                                         (on a GPU)
    TRITON_INTERPRET=1 python -m benchmarks.gpu.kernels --tiny    (a dry run anywhere)

Only PyTorch, Triton and numpy are needed: the C++ extension need not be built, nothing is
downloaded. Each check compares with the reference on the CPU. Times are of CUDA graphs of several
calls whose blocks lie in different places, so that the L2 cache does not hold them. `gb_per_s` are
the bytes of codes and dynamic scales that a call reads, `share_of_copy` is that over the bytes
per second that a copy within the device reads and writes. Peer: PyTorch's
scaled_dot_product_attention over contiguous float16.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

SOURCES = Path(__file__).parents[2] / "src"


def _import_without_the_extension() -> None:
    """Let these packages be folders of modules: what their __init__ imports need not be there."""
    for name in ("tightkv", "tightkv.formats", "tightkv.kernels"):
        package = types.ModuleType(name)
        package.__path__ = [str(SOURCES.joinpath(*name.split(".")))]
        sys.modules.setdefault(name, package)


_import_without_the_extension()

from tightkv.formats.base import CODE_TYPES, Granularity, TensorFormat  # noqa: E402
from tightkv.formats.layout import BlockLayout  # noqa: E402
from tightkv.kernels import reference  # noqa: E402
from tightkv.kernels.arguments import AttentionBatch, AttentionParams, LayerCache  # noqa: E402
from tightkv.kernels.triton import TritonBackend  # noqa: E402

FORMATS = {
    "float32": TensorFormat("float32", CODE_TYPES["float32"]),
    "float16": TensorFormat("float16", CODE_TYPES["float16"]),
    "bfloat16": TensorFormat("bfloat16", CODE_TYPES["bfloat16"]),
    "int8 static": TensorFormat("int8", CODE_TYPES["int8"], static=Granularity.CHANNEL),
    "int8 per token": TensorFormat("int8", CODE_TYPES["int8"], dynamic=True),
    "int8 two-factor": TensorFormat("int8", CODE_TYPES["int8"], True, Granularity.CHANNEL),
    "fp8_e4m3 static": TensorFormat("fp8_e4m3", CODE_TYPES["fp8_e4m3"], False, Granularity.HEAD),
    "fp8_e4m3 per token": TensorFormat("fp8_e4m3", CODE_TYPES["fp8_e4m3"], dynamic=True),
    "fp8_e5m2": TensorFormat("fp8_e5m2", CODE_TYPES["fp8_e5m2"]),
}
TIMED = ("float16", "int8 static", "int8 per token", "fp8_e4m3 static")
HEADS = ((32, 8, 128), (64, 8, 128))
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Sizes:
    """What is run."""

    heads: tuple[tuple[int, int, int], ...] = HEADS
    batches: tuple[int, ...] = (1, 16, 64)
    contexts: tuple[int, ...] = (2048, 8192, 32768, 65536)
    prompts: tuple[int, ...] = (2048, 8192)
    checked: tuple[tuple[int, int], ...] = ((1, 700), (1, 256), (40, 300), (70, 70), (1, 1))
    copied_bytes: int = 2**30
    cold_bytes: int = 2**28  # more than any L2 cache holds


TINY = Sizes(
    heads=((4, 2, 32),),
    batches=(1, 2),
    contexts=(48, 288),
    prompts=(24,),
    checked=((1, 270), (3, 20)),
    copied_bytes=2**16,
    cold_bytes=0,
)


class Clock:
    """Times of calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def seconds(self, calls: list[Callable[[], object]]) -> float:
        """Median seconds of one of several calls that do alike work."""
        for call in calls[:2]:
            call()
        run = self._graph(calls) if self._cuda else lambda: [call() for call in calls]
        self._once(run)
        repeats = max(3, min(50, int(0.05 / max(self._once(run), 1e-6)))) if self._cuda else 1
        return statistics.median(self._once(run) for _ in range(repeats)) / len(calls)

    def _graph(self, calls: list[Callable[[], object]]) -> Callable[[], object]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def _once(self, run: Callable[[], object]) -> float:
        if not self._cuda:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1000


@dataclass(frozen=True)
class Scene:
    """A filled cache on the CPU, and queries."""

    cache: LayerCache
    query: torch.Tensor
    batch: AttentionBatch
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor


def make_scene(tensor_format: TensorFormat, lengths: tuple[tuple[int, int], ...]) -> Scene:
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


def check_format(backend: TritonBackend, name: str, sizes: Sizes) -> dict[str, object]:
    """Bytes, attention's error, and a decode of the last row of each sequence alone."""
    device, scene = backend.device, make_scene(FORMATS[name], sizes.checked)
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
    return {
        "bytes_equal": torch.equal(cache.blocks.cpu(), scene.cache.blocks)
        and torch.equal(counts[1].cpu(), counts[0]),
        "error": error,
        "tolerance": FORMATS[name].tolerance,
        "row_alone_equal": alone,
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


def checks(backend: TritonBackend, sizes: Sizes) -> dict[str, object]:
    results: dict[str, object] = {}
    for name in FORMATS:
        results[name] = result = check_format(backend, name, sizes)
        print(f"{name}: {result}", flush=True)
    for name in ("int8 static", "fp8_e4m3 static", "fp8_e5m2"):
        results[f"codes of {name}"] = check_codes(backend, name)
        print(f"every code of {name}: {results[f'codes of {name}']}", flush=True)
    return results


def copy_bytes_per_second(clock: Clock, device: torch.device, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / clock.seconds([lambda: target.copy_(source)] * 4)


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
    heads: tuple[int, int, int],
    batch: int,
    context: int,
    cold_bytes: int,
) -> float:
    """Seconds of a call; several calls take turns where one would stay in the L2 cache."""
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
    batches = [AttentionBatch(starts, seq_lens, table.contiguous(), 1) for table in ids]
    return clock.seconds(
        [
            lambda batch=batch: backend.paged_attention(query, cache, batch, params)  # type: ignore[misc]
            for batch in batches
        ]
    )


def time_torch(
    clock: Clock,
    device: torch.device,
    heads: tuple[int, int, int],
    batch: int,
    queries: int,
    context: int,
) -> float:
    """Seconds of scaled_dot_product_attention over contiguous float16."""
    num_heads, num_kv_heads, size = heads
    query = torch.randn(batch, num_heads, queries, size, device=device, dtype=torch.float16)
    key = torch.randn(batch, num_kv_heads, context, size, device=device, dtype=torch.float16)
    value = torch.randn_like(key)
    attention = torch.nn.functional.scaled_dot_product_attention
    return clock.seconds(
        [lambda: attention(query, key, value, is_causal=queries > 1, enable_gqa=True)] * 4
    )


def time_prefill(
    backend: TritonBackend, clock: Clock, name: str, heads: tuple[int, int, int], tokens: int
) -> float:
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


def decode_points(
    sizes: Sizes, device: torch.device
) -> Iterator[tuple[tuple[int, int, int], int, int]]:
    """Heads, batch and context, the small ones first; those that fit the memory."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**32
    for context in sizes.contexts:
        for batch in sizes.batches:
            for heads in sizes.heads:
                if 4 * heads[1] * heads[2] * batch * context < free / 3:
                    yield heads, batch, context


def times(
    backend: TritonBackend, sizes: Sizes, copy_rate: float, deadline: float
) -> dict[str, list[dict[str, object]]]:
    clock, device = Clock(backend.device), backend.device
    results: dict[str, list[dict[str, object]]] = {"decode": [], "prefill": []}
    for heads, tokens in ((heads, tokens) for tokens in sizes.prompts for heads in sizes.heads):
        flops = 4 * heads[0] * heads[2] * tokens * (tokens + 1) / 2
        seconds = {name: time_prefill(backend, clock, name, heads, tokens) for name in TIMED}
        seconds["torch float16"] = time_torch(clock, device, heads, 1, tokens, tokens)
        for name, taken in seconds.items():
            point = {"format": name, "heads": heads, "tokens": tokens, "ms": 1e3 * taken}
            results["prefill"].append(point | {"tflops": flops / taken / 1e12})
            print(results["prefill"][-1], flush=True)
    for heads, batch, context in decode_points(sizes, device):
        if time.monotonic() > deadline:
            print("the time is up: the longer contexts are left out", flush=True)
            break
        for name in (*TIMED, "torch float16"):
            if name in FORMATS:
                taken = time_decode(backend, clock, name, heads, batch, context, sizes.cold_bytes)
            else:
                taken = time_torch(clock, device, heads, batch, 1, context)
            bits = FORMATS[name].effective_bits(heads[2]) if name in FORMATS else 16
            rate = 2 * heads[1] * heads[2] * batch * context * bits / 8 / taken
            point = {"format": name, "heads": heads, "batch": batch, "context": context}
            point |= {"us": 1e6 * taken, "gb_per_s": rate / 1e9, "share_of_copy": rate / copy_rate}
            results["decode"].append(point)
            print(point, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--minutes", type=float, default=5.0, help="no new times after these")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    sizes = TINY if options.tiny else Sizes()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = TritonBackend(device)
    print(backend.name, flush=True)
    report: dict[str, object] = {"kernels": backend.name, "torch": torch.__version__}
    report["checks"] = checks(backend, sizes)
    copy_rate = copy_bytes_per_second(Clock(device), device, sizes.copied_bytes)
    report["copy_gb_per_s"] = copy_rate / 1e9
    report |= times(backend, sizes, copy_rate, deadline)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
