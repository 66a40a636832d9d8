"""The works: what each engine does, and what its figure is held against."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.serving.driver import Prompts, Result
from benchmarks.serving.engines import Arm, Engine, Outcome, best, take_turns
from benchmarks.serving.report import Bar, Row, at_least, at_most, compare

__all__ = ["FULL", "QUICK", "WORKS", "Bench", "Engines", "Sizes"]

# Bars of int8 against float16 in the decode kernel, by heads, KV heads and head size.
KERNEL_BARS = {(8, 8, 64): 2.0, (9, 3, 64): 1.6, (32, 8, 128): 1.5, (4, 1, 256): 1.4}
# The answers of two engines with the same weights may part later, by rounding.
COMPARED_TOKENS = 32


@dataclass(frozen=True)
class Batch:
    """Requests of one size, and the KV cache that they share."""

    num_prompts: int
    prompt_len: int
    new_tokens: int
    kv_cache_bytes: int = 2**30

    @property
    def max_model_len(self) -> int:
        return self.prompt_len + self.new_tokens


@dataclass(frozen=True)
class Sizes:
    """How much each work is."""

    kernel_tokens: int
    kernel_repeats: int
    lengths: tuple[int, ...]
    steps: int
    prefill_tokens: int
    batch: Batch
    saturated: Batch
    memory: Batch


FULL = Sizes(
    kernel_tokens=8192,
    kernel_repeats=180,
    lengths=(64, 2048, 4096, 6144, 8064),
    steps=8,
    prefill_tokens=4096,
    batch=Batch(16, 32, 128),
    saturated=Batch(32, 128, 512, 64 * 2**20),
    memory=Batch(1, 8160, 16),
)
QUICK = Sizes(
    kernel_tokens=2048,
    kernel_repeats=20,
    lengths=(64, 512, 1024),
    steps=4,
    prefill_tokens=512,
    batch=Batch(16, 32, 16),
    saturated=Batch(6, 128, 32, 24 * 2**20),
    memory=Batch(1, 1024, 16),
)


@dataclass(frozen=True)
class Engines:
    """Us, twice, and the peers."""

    tightkv: Engine
    kernel: Engine
    llama_cpp: Engine
    vllm: Engine
    transformers: Engine


@dataclass
class Bench:
    """What the works share, and what they have found.

    Attributes:
        engines: ours and the peers.
        sizes: how much each work is.
        rounds: how often the arms take turns.
        threads: of every engine.
        token_ids: the text, of which prompts are cut.
        folder: for the prompts' files.
        figures: what the drivers found, by work and arm, a list over the rounds.
        versions: of the engines that ran.
        notes: sentences for below the table.
        failures: of our own engine.
    """

    engines: Engines
    sizes: Sizes
    rounds: int
    threads: int
    token_ids: list[int]
    folder: Path
    figures: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def measure(
        self, name: str, work: str, arms: Sequence[Arm], rounds: int | None = None, **options: Any
    ) -> dict[str, Outcome]:
        """Let arms take turns at a work of their drivers, and keep what they find under `name`."""
        options = {"threads": self.threads, **options}
        outcomes = take_turns(name, work, arms, rounds or self.rounds, **options)
        for outcome in outcomes.values():
            self.keep(name, outcome)
        return outcomes

    def keep(self, name: str, outcome: Outcome) -> None:
        engine = outcome.arm.engine
        if outcome.failure and engine in (self.engines.tightkv, self.engines.kernel):
            self.failures.append(f"{name}: {outcome.arm.name} {outcome.failure}")
        for result in outcome.results:
            self.versions[engine.name] = result["version"]
            if result["load_average"] > self.threads + 1:
                self.notes.append(
                    f"DOUBTFUL {name}: {outcome.arm.name} ran at a load of "
                    f"{result['load_average']}: something else was running"
                )
        self.figures.setdefault(name, {})[outcome.arm.name] = outcome.failure or [
            {key: result[key] for key in result if key not in ("version", "answers")}
            for result in outcome.results
        ]

    def prompts(self, batch: Batch) -> Path:
        """The file of a batch's prompts: different pieces of the text."""
        return self.write(
            [
                self.token_ids[index * batch.prompt_len : (index + 1) * batch.prompt_len]
                for index in range(batch.num_prompts)
            ]
        )

    def write(self, prompts: Prompts) -> Path:
        path = self.folder / f"{len(prompts)}x{len(prompts[0])}.json"
        path.write_text(json.dumps(prompts), encoding="utf-8")
        return path

    def ours(self, kv_cache: str) -> Arm:
        """Our engine with a cache format."""
        return Arm(f"TightKV {kv_cache}", self.engines.tightkv, {"kv_cache": kv_cache})


tokens_per_second = itemgetter("tokens_per_second")


def kernel(bench: Bench) -> list[Row]:
    """The decode kernel by format, against float16, and the machine's peaks."""
    rows = []
    for threads in sorted({1, bench.threads}):
        count = f"{threads} thread{'s' if threads > 1 else ''}"
        arm = Arm("TightKV", bench.engines.kernel)
        peaks = bench.measure(f"peaks, {count}", "peaks", [arm], 1, threads=threads)["TightKV"]
        for title, unit, key in (
            ("matrix product in float32", "GFLOP/s", "gflops"),
            ("sum over 512 MiB", "GB/s", "gigabytes_per_second"),
        ):
            rows.append(Row(f"peak: {title}, {count}", unit, peaks.median(itemgetter(key))))
        outcome = bench.measure(
            f"kernel, {count}",
            "kernel",
            [arm],
            1,
            threads=threads,
            lengths=bench.sizes.kernel_tokens,
            repeats=bench.sizes.kernel_repeats,
        )["TightKV"]
        for result in outcome.results:
            for shape in result["results"]:
                rows += _kernel_rows(shape["shape"], shape["seconds"], result["tokens"], count)
    bench.notes.append(
        f"Decode attention kernel over {bench.sizes.kernel_tokens:,} cached tokens: "
        "heads/KV heads×head size"
    )
    return rows


def _kernel_rows(
    shape: Sequence[int], seconds: dict[str, float], tokens: int, count: str
) -> list[Row]:
    num_heads, num_kv_heads, size = shape
    rates = {name: tokens * num_kv_heads / value / 1e6 for name, value in seconds.items()}
    channel, token_head, fp8 = "int8 per channel", "int8_per_token_head", "fp8_e4m3 per tensor"
    is_model_shape = tuple(shape) == (9, 3, 64)
    pairs: list[tuple[str, str, Bar | None]] = [
        (channel, "float16", at_least(KERNEL_BARS[num_heads, num_kv_heads, size])),
        (channel, "int8 per tensor", at_least(0.98)),
        (token_head, "float16", at_least(1.5) if is_model_shape else None),
        (fp8, "float16", at_least(1.0) if is_model_shape else None),
    ]
    return [
        Row(
            f"{num_heads}/{num_kv_heads}×{size}, {count}: {ours}",
            "Mtok·heads/s",
            rates[ours],
            peer,
            rates[peer],
            bar,
        )
        for ours, peer, bar in pairs
    ]


def slope(bench: Bench) -> list[Row]:
    """How much a decode step slows down with each cached token."""
    sizes, llama = bench.sizes, bench.engines.llama_cpp
    longest = sizes.lengths[-1]
    arms = [
        bench.ours("int8"),
        Arm("llama.cpp q8_0", llama, {"kv_cache": "q8_0"}),
        bench.ours("float16"),
        Arm("llama.cpp f16", llama, {"kv_cache": "f16"}),
    ]
    found = bench.measure(
        "slope",
        "slope",
        arms,
        prompts=bench.write([bench.token_ids[:longest]]),
        lengths=sizes.lengths,
        steps=sizes.steps,
        max_model_len=longest + sizes.steps + 2,
    )
    title = f"decode step per 1,000 tokens, {sizes.lengths[0]} to {longest:,} cached"
    return [
        compare(f"{title}, {cache}", "ms", _slope, found[ours], found[peer], at_most(limit))
        for cache, ours, peer, limit in (
            ("int8", "TightKV int8", "llama.cpp q8_0", 0.2),
            ("float16", "TightKV float16", "llama.cpp f16", 0.35),
        )
    ]


def _slope(result: Result) -> float:
    """Milliseconds per 1,000 tokens, by least squares."""
    return 1e6 * statistics.linear_regression(result["lengths"], result["seconds"]).slope


def prefill(bench: Bench) -> list[Row]:
    """One long prompt."""
    tokens = bench.sizes.prefill_tokens
    arms = [
        bench.ours("int8"),
        *(
            Arm(
                f"llama.cpp {cache}, n_batch {size}",
                bench.engines.llama_cpp,
                {"kv_cache": cache, "batch_size": size},
            )
            for cache in ("f16", "q8_0")
            for size in (512, 2048)
        ),
    ]
    ours, *peers = bench.measure(
        "prefill",
        "prefill",
        arms,
        prompts=bench.write([bench.token_ids[:tokens]]),
        max_model_len=tokens + 5,
    ).values()
    peer = best(peers, tokens_per_second)
    title = f"prefill of {tokens:,} tokens, int8"
    return [compare(title, "tokens/s", tokens_per_second, ours, peer, at_least(1.0))]


def batch(bench: Bench) -> list[Row]:
    """Short prompts together, greedily, prefill included."""
    size, engines = bench.sizes.batch, bench.engines
    options: dict[str, Any] = {"prompts": bench.prompts(size), "new_tokens": size.new_tokens}
    limits = {"max_model_len": size.max_model_len, "kv_cache_bytes": size.kv_cache_bytes}
    arms = [
        bench.ours("auto"),
        bench.ours("int8"),
        Arm("vLLM", engines.vllm),
        *(
            Arm(f"llama.cpp, kv_unified {flag}", engines.llama_cpp, {"kv_unified": flag})
            for flag in (0, 1)
        ),
    ]
    found = bench.measure("batch", "generate", arms, **options, **limits)
    found |= bench.measure(
        "batch", "generate", [Arm("transformers", engines.transformers)], 1, **options
    )
    ours, int8, vllm, *llamas, transformers = found.values()
    bench.notes += [
        _agreement(ours, other) for other in (int8, vllm, *llamas, transformers) if other.results
    ]
    llama = best(llamas, tokens_per_second)
    title = f"{size.num_prompts} prompts of {size.prompt_len} tokens, {size.new_tokens} new"
    return [
        compare(f"{title}, {cache}", "tokens/s", tokens_per_second, mine, peer, bar)
        for cache, mine, bar in (("auto", ours, at_least(1.0)), ("int8", int8, None))
        for peer in (vllm, llama, transformers)
    ]


def _agreement(ours: Outcome, other: Outcome) -> str:
    """How many greedy answers begin alike: engines with the same weights should mostly agree."""
    if not ours.results:
        return f"{other.arm.name}: there are no answers of ours to compare with"
    pairs = list(zip(ours.results[0]["answers"], other.results[0]["answers"], strict=True))
    length = min(COMPARED_TOKENS, len(pairs[0][0]))
    equal = sum(a[:length] == b[:length] for a, b in pairs)
    return (
        f"{other.arm.name}: {equal} of {len(pairs)} greedy answers equal those of "
        f"{ours.arm.name} over the first {length} tokens"
    )


def saturated(bench: Bench) -> list[Row]:
    """More requests than the cache can hold at once."""
    size = bench.sizes.saturated
    vllm = bench.engines.vllm
    arms = [
        bench.ours("int8"),
        # Its blocks of 128 tokens waste much of a small cache; these are the smallest it takes.
        Arm("vLLM, float32 cache, blocks of 32", vllm, {"block_size": 32}),
        # They fail where the processor has no AVX-512.
        Arm("vLLM, fp8 cache", vllm, {"kv_cache": "fp8"}),
        Arm("vLLM, fp8 cache, blocks of 32", vllm, {"kv_cache": "fp8", "block_size": 32}),
    ]
    ours, float32, *fp8 = bench.measure(
        "saturated",
        "generate",
        arms,
        1,
        prompts=bench.prompts(size),
        new_tokens=size.new_tokens,
        kv_cache_bytes=size.kv_cache_bytes,
        max_model_len=size.max_model_len,
    ).values()
    title = (
        f"{size.num_prompts} prompts of {size.prompt_len} tokens, {size.new_tokens} new, "
        f"{size.kv_cache_bytes // 2**20} MiB of KV cache, int8"
    )
    return [
        compare(title, "tokens/s", tokens_per_second, ours, peer, bar)
        for peer, bar in ((float32, at_least(1.8)), (best(fp8, tokens_per_second), None))
    ]


def overhead(bench: Bench) -> list[Row]:
    """What a decode step spends outside the forward pass and the sampler."""
    size = bench.sizes.batch
    (outcome,) = bench.measure(
        "overhead",
        "overhead",
        [bench.ours("auto")],
        prompts=bench.prompts(size),
        new_tokens=size.new_tokens,
        max_model_len=size.max_model_len,
    ).values()
    return [
        Row(
            f"outside forward pass and sampler, {size.num_prompts} sequences",
            "ms",
            outcome.median(lambda result: 1e3 * result["outside_seconds"]),
            "whole step",
            outcome.median(lambda result: 1e3 * result["step_seconds"]),
            at_most(0.05),
            outcome.failure,
        )
    ]


def startup(bench: Bench) -> list[Row]:
    """From the start of the process to its first token."""
    size = Batch(1, 32, 1)
    options: dict[str, Any] = {"prompts": bench.prompts(size), "max_model_len": 1024}
    arms = [
        bench.ours("auto"),
        Arm("vLLM", bench.engines.vllm),
        Arm("vLLM, enforce_eager", bench.engines.vllm, {"enforce_eager": 1}),
    ]
    outcomes: dict[str, Outcome] = {}
    for arm in arms:  # one after the other: a large engine pushes the files of others out of memory
        # Not kept: from here on files lie in memory, and what an engine compiles once is compiled.
        take_turns("startup, not kept", "startup", [arm], 1, threads=bench.threads, **options)
        outcomes |= bench.measure("startup", "startup", [arm], **options)
    ours, *vllms = outcomes.values()
    seconds = itemgetter("first_token_seconds")
    vllm = best(vllms, seconds, min)
    return [compare("process start to first token", "s", seconds, ours, vllm, at_most(0.25))]


def memory(bench: Bench) -> list[Row]:
    """Peak memory of a process with one long sequence, by cache format."""
    size = bench.sizes.memory
    int8, float16 = bench.measure(
        "memory",
        "memory",
        [bench.ours("int8"), bench.ours("float16")],
        1,
        prompts=bench.prompts(size),
        new_tokens=size.new_tokens,
        max_model_len=size.max_model_len,
    ).values()
    title = f"peak memory, {size.prompt_len:,} cached tokens, int8"
    return [compare(title, "MiB", _peak_mebibytes, int8, float16, at_most(1.0))]


def _peak_mebibytes(result: Result) -> float:
    return float(result["peak_bytes"]) / 2**20


WORKS: dict[str, Callable[[Bench], list[Row]]] = {
    "kernel": kernel,
    "slope": slope,
    "prefill": prefill,
    "batch": batch,
    "saturated": saturated,
    "overhead": overhead,
    "startup": startup,
    "memory": memory,
}
