"""Speed of the decode attention kernel, by format, in one process; our float16 is the peer.

    python benchmarks/kernels/decode_attention.py [--tokens 4096] [--threads 2] [--copies 30]

One query token attends over the cached tokens; blocks lie in random order. Arms take turns in
random order, so that a busy moment of the machine hits all of them, and what the arm before left
in the processor's cache; some times they get new memory. With `--copies` each arm has that many
caches and takes them in turn, as a model its layers': they then come from memory. Medians are
given. `Mtok·heads/s` counts cached tokens times KV heads. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tightkv.formats import BlockLayout, TensorScale, resolve_format
from tightkv.kernels import (
    AttentionBatch,
    AttentionParams,
    Backend,
    LayerCache,
    paged_attention,
    reshape_and_cache,
    select_backend,
)

SHAPES = ((9, 3, 64), (8, 8, 64), (32, 8, 128), (4, 1, 256))
ARMS = (
    "float16",
    "float32",
    "bfloat16",
    "int8 per channel",
    "int8 per tensor",
    "int8 two-factor",
    "int8_per_token_head",
    "fp8_e4m3 per tensor",
    "fp8_per_token_head",
    "fp8_e5m2",
)
BLOCK_SIZE = 16
ROUNDS_IN_PLACE = 5


@dataclass(frozen=True)
class Arm:
    """One format, its cache filled, ready to be timed."""

    cache: LayerCache
    batch: AttentionBatch
    query: torch.Tensor

    params: AttentionParams

    def run(self, backend: Backend) -> None:
        paged_attention(backend, self.query, self.cache, self.batch, self.params)


def scale_of(arm: str, num_kv_heads: int, size: int) -> TensorScale | None:
    if "per tensor" in arm:
        return TensorScale(torch.tensor(0.05))
    if "per channel" in arm or "two-factor" in arm:
        values = torch.linspace(0.03, 0.06, num_kv_heads * size).view(num_kv_heads, size)
        return TensorScale(values, dynamic="two-factor" in arm)
    return None


def block_layout(arm: str, shape: tuple[int, int, int]) -> BlockLayout:
    _, num_kv_heads, size = shape
    scale = scale_of(arm, num_kv_heads, size)
    tensor_format = resolve_format(arm.split()[0], torch.float32, scale)
    return BlockLayout(tensor_format, tensor_format, num_kv_heads, size, size, BLOCK_SIZE)


def prepare(arm: str, shape: tuple[int, int, int], num_tokens: int, backend: Backend) -> Arm:
    num_heads, num_kv_heads, size = shape
    layout = block_layout(arm, shape)
    scale = scale_of(arm, num_kv_heads, size)
    factors = scale.per_channel(num_kv_heads, size) if scale else None
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    blocks = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
    cache = LayerCache(blocks, layout, factors, factors)
    table = torch.randperm(num_blocks)
    position = torch.arange(num_tokens)
    reshape_and_cache(
        backend,
        cache,
        torch.randn(num_tokens, num_kv_heads, size),
        torch.randn(num_tokens, num_kv_heads, size),
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE,
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(num_tokens, dtype=torch.bool),
    )
    batch = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
        table[None].to(torch.int32),
    )
    return Arm(cache, batch, torch.randn(1, num_heads, size), AttentionParams(size**-0.5))


def time_arms(
    names: Sequence[str],
    shape: tuple[int, int, int],
    num_tokens: int,
    backend: Backend,
    rounds: int,
    copies: int = 1,
) -> dict[str, float]:
    """Median seconds of one call, arms taking turns."""
    times: dict[str, list[float]] = {name: [] for name in names}
    arms: dict[str, list[Arm]] = {}
    num_calls = max(copies, 4)
    for round_number in range(rounds):
        if round_number % ROUNDS_IN_PLACE == 0:  # the old arms go after the new ones have come
            arms = {
                name: [prepare(name, shape, num_tokens, backend) for _ in range(copies)]
                for name in names
            }
        for name, of_layers in random.sample(list(arms.items()), len(arms)):
            of_layers[-1].run(backend)  # warm: the arm before has used the cache
            start = time.perf_counter()
            for call in range(num_calls):
                of_layers[call % copies].run(backend)
            times[name].append((time.perf_counter() - start) / num_calls)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode attention by KV cache format.")
    parser.add_argument("--tokens", type=int, default=4096, help="cached tokens")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--copies", type=int, default=1, help="caches of each arm")
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=lambda text: tuple(map(int, text.split("/"))),
        default=SHAPES,
        metavar="H/KV/D",
        help="query heads / KV heads / head size",
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    backend = select_backend(torch.device("cpu"))
    print(f"{backend.name}, {options.threads} thread(s), {options.tokens} cached tokens")
    results = []
    for shape in options.shapes:
        medians = time_arms(ARMS, shape, options.tokens, backend, options.rounds, options.copies)
        print(f"\n{shape[0]}/{shape[1]} heads of size {shape[2]}")
        print(f"{'format':22} {'µs':>9} {'Mtok·heads/s':>13} {'GB/s':>7} {'× float16':>10}")
        for name, seconds in medians.items():
            rate = options.tokens * shape[1] / seconds
            num_bytes = block_layout(name, shape).block_bytes * options.tokens // BLOCK_SIZE
            ratio = medians["float16"] / seconds
            print(
                f"{name:22} {seconds * 1e6:9.1f} {rate / 1e6:13.1f} "
                f"{num_bytes / seconds / 1e9:7.2f} {ratio:10.2f}"
            )
            results.append({"shape": shape, "format": name, "seconds": seconds, "ratio": ratio})
    print(
        json.dumps(
            {
                "benchmark": "decode_attention",
                "kernel": backend.name,
                "machine": platform.machine(),
                "threads": options.threads,
                "tokens": options.tokens,
                "copies": options.copies,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
