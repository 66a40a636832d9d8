"""Snapshots of an engine that serves several requests, for what shows them."""

from __future__ import annotations

import random
from dataclasses import replace

from tightkv.metrics import (
    EngineSnapshot,
    EngineStats,
    GroupSnapshot,
    LayerSnapshot,
    PoolSnapshot,
    RequestSnapshot,
    RequestStats,
    SwapSnapshot,
    TensorSnapshot,
)
from tightkv.server.history import History
from tightkv.server.state import QualitySummary, ServerFacts, State, build

BLOCK_SIZE = 16
NUM_LAYERS = 30
BLOCK_BYTES = NUM_LAYERS * 3 * 64 * 2 * BLOCK_SIZE * 66 // 64  # int8 with fp16 scales
NOW = 11_580.4

REQUESTS = (
    RequestSnapshot(
        request_id="chatcmpl-7f3a91c24e0b4d6f",
        status="running",
        num_prompt_tokens=412,
        num_computed_tokens=530,
        num_generation_tokens=119,
        max_tokens=256,
        num_cached_tokens=384,
        num_blocks=34,
    ),
    RequestSnapshot(
        request_id="chatcmpl-0c5d28e7b9114aa3",
        status="running",
        num_prompt_tokens=396,
        num_computed_tokens=402,
        num_generation_tokens=7,
        max_tokens=512,
        num_cached_tokens=384,
        num_blocks=26,
    ),
    RequestSnapshot(
        request_id="cmpl-e18f6b3d52c04c17",
        status="running",
        num_prompt_tokens=1843,
        num_computed_tokens=1024,
        num_generation_tokens=0,
        max_tokens=64,
        num_cached_tokens=0,
        num_blocks=64,
    ),
    RequestSnapshot(
        request_id="cmpl-<b>named by the client, at some length</b>-00000001",
        status="waiting",
        num_prompt_tokens=1024,
        num_computed_tokens=0,
        num_generation_tokens=0,
        max_tokens=2048,
        num_cached_tokens=0,
        num_blocks=0,
    ),
)


def tensor(name: str = "int8", clip_rate: float = 0.0, bits: float = 8.25) -> TensorSnapshot:
    return TensorSnapshot(
        format=name,
        granularity="two_factor" if name == "int8" else "none",
        source="probe" if name == "int8" else "kv_cache_dtype_skip_layers",
        block_bytes=int(3 * 64 * BLOCK_SIZE * bits / 8),
        bits=bits,
        clip_rate=clip_rate,
    )


def layers() -> tuple[LayerSnapshot, ...]:
    """30 layers; the first is kept in 16 bits, layers 4 and 17 clip a little."""
    k_clips = {4: 0.0031, 9: 0.00042, 17: 0.0127}
    made = [
        LayerSnapshot(layer_idx=i, group=0, k=tensor(clip_rate=k_clips.get(i, 0.0)), v=tensor())
        for i in range(NUM_LAYERS)
    ]
    whole = tensor("bfloat16", bits=16)
    made[0] = LayerSnapshot(layer_idx=0, group=0, k=whole, v=whole)
    return tuple(made)


def block_letters(num_blocks: int, seed: int = 0) -> str:
    """Runs of blocks in use, shared, cached and free, as a server has them after some hours."""
    source = random.Random(seed)
    letters = ""
    while len(letters) < num_blocks:
        letter = source.choices(".cus", (5, 4, 5, 1))[0]
        letters += letter * source.randint(1, max(2, num_blocks // 40))
    return letters[:num_blocks]


FULL = GroupSnapshot(sliding_window=None, num_used_blocks=80)


def snapshot(
    blocks_of: PoolSnapshot | None = None,
    requests: tuple[RequestSnapshot, ...] = REQUESTS,
    groups: tuple[GroupSnapshot, ...] = (FULL,),
) -> EngineSnapshot:
    """An engine of 174 blocks and no swap space, unless another pool is given."""
    blocks_of = blocks_of or pool(174)
    blocks = blocks_of.blocks
    num_bytes = blocks_of.block_bytes * len(blocks)
    return EngineSnapshot(
        stats=EngineStats(prefix_cache_queries=1_421_460, prefix_cache_hits=611_227),
        num_running=sum(request.status == "running" for request in requests),
        num_waiting=sum(request.status == "waiting" for request in requests),
        block_size=BLOCK_SIZE,
        num_blocks=len(blocks),
        num_free_blocks=blocks.count(".") + blocks.count("c"),
        max_model_len=2048,
        weight_bytes=269_060_552,
        peak_bytes=101_187_584,
        total_bytes=max(2 * 2**30, num_bytes + num_bytes // 4),
        bytes_per_token=len(groups) * blocks_of.block_bytes / BLOCK_SIZE,
        requests_that_fit=lambda num_tokens: (
            (blocks.count(".") + blocks.count("c")) / len(groups) / -(-num_tokens // BLOCK_SIZE)
        ),
        layers=layers(),
        groups=groups,
        pool=blocks_of,
        requests=requests,
    )


def swapping() -> EngineSnapshot:
    """An engine whose swap space is in use."""
    engine = snapshot()
    stats = replace(
        engine.stats,
        num_preemptions=24,
        num_swaps=23,
        num_swap_fallbacks=1,
        num_swapped_out_blocks=1804,
        num_swapped_in_blocks=1621,
    )
    slots = SwapSnapshot(
        num_slots=5650,
        slot_bytes=BLOCK_BYTES,
        num_used_slots=61,
        num_kept_slots=1203,
        num_sequences=2,
    )
    return replace(engine, stats=stats, swap=slots)


def pool(num_blocks: int, block_bytes: int = BLOCK_BYTES) -> PoolSnapshot:
    return PoolSnapshot(block_bytes=block_bytes, blocks=block_letters(num_blocks))


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def history(engine: EngineSnapshot, seconds: int = 300) -> History:
    """Five minutes of requests that come and go."""
    source, clock = random.Random(1), Clock()
    busy = 0

    def look() -> EngineSnapshot:
        free = int(engine.num_blocks * (0.98 - 0.12 * busy - 0.05 * source.random()))
        return replace(engine, num_free_blocks=free)

    kept = History(look, clock=clock)
    for second in range(seconds):
        clock.now = 100 + second
        kept.samples()
        busy = 0 if 120 < second < 150 else 1 + second // 60
        made = busy * source.randint(7, 11)
        stats = RequestStats(arrival_time=0, num_prompt_tokens=400, first_token_time=0.0)
        kept.on_tokens(stats, made, clock.now)
        if busy and source.random() < 0.25:
            stats.first_token_time = None
            kept.on_tokens(stats, 1, 0.14 + 0.5 * source.random() ** 3)
            kept.on_step(made + 1 + source.randint(40, 420))
        else:
            kept.on_step(made)
    clock.now += 1
    return kept


def state(
    engine: EngineSnapshot | None = None,
    *,
    chat: bool = True,
    error: str | None = None,
    quality: QualitySummary | None = None,
) -> State:
    engine = engine or snapshot()
    return build(
        ServerFacts(model="SmolLM2-135M-Instruct", version="0.1.0", chat=chat, start_time=0.0),
        engine,
        history(engine),
        now=NOW,
        arrival_times={r.request_id: NOW - 3.2 * (i + 1) for i, r in enumerate(engine.requests)},
        error=error,
        quality=quality,
    )
