"""How long one batch takes: its prompts and its answers apart, at several depths."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from tightkv.benchmark.arm import load_for_arms, make_engine, read_options
from tightkv.benchmark.data import BenchRequest, Vocabulary
from tightkv.benchmark.offline import Load, run_load, warm_up
from tightkv.benchmark.sweep import MeanStd
from tightkv.calibration.progress import Progress, no_progress
from tightkv.config import EngineConfig
from tightkv.engine.arm_spec import parse_arms
from tightkv.engine.llm_engine import LLMEngine
from tightkv.errors import ConfigError, EngineError
from tightkv.models import LoadedModel

__all__ = ["LATENCY_PERCENTILES", "LatencyReport", "LatencyRow", "LatencySweep", "bench_latency"]

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySweep:
    """What is varied: every combination is measured.

    Attributes:
        batch_sizes: sequences.
        input_lens: tokens of each prompt.
        output_lens: tokens of each answer.
        depths: tokens that are in the cache before the prompt.
        repetitions: of each combination.
        seed: of the prompts.
    """

    batch_sizes: tuple[int, ...] = (8,)
    input_lens: tuple[int, ...] = (32,)
    output_lens: tuple[int, ...] = (128,)
    depths: tuple[int, ...] = (0,)
    repetitions: int = 5
    seed: int = 0

    def __iter__(self) -> Any:
        return itertools.product(self.depths, self.batch_sizes, self.input_lens, self.output_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRow:
    """One combination.

    Attributes:
        latency: seconds of the batch, from its first step to its last token.
        prefill: prompt tokens of the batch per second, until each sequence has its first token.
        decode: tokens of the batch per second after that; None with one token per answer.
    """

    kv_cache_dtype: str
    depth: int
    batch_size: int
    input_len: int
    output_len: int
    latency: MeanStd
    prefill: MeanStd
    decode: MeanStd | None

    def as_json(self) -> dict[str, Any]:
        """Under the keys of `vllm bench latency`, and of llama-bench for the two phases."""
        percentiles = {
            str(percent): float(numpy.percentile(self.latency.samples, percent))
            for percent in LATENCY_PERCENTILES
        }
        return {
            "kv_cache_dtype": self.kv_cache_dtype,
            "n_depth": self.depth,
            "batch_size": self.batch_size,
            "n_prompt": self.input_len,
            "n_gen": self.output_len,
            "avg_latency": self.latency.mean,
            "latencies": [*self.latency.samples],
            "percentiles": percentiles,
            "prefill": self.prefill.as_json("ts"),
            "decode": self.decode.as_json("ts") if self.decode else None,
        }


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """All rows, and what they were measured with."""

    model: str
    threads: int
    rows: tuple[LatencyRow, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": "latency",
            "model_id": self.model,
            "threads": self.threads,
            "rows": [row.as_json() for row in self.rows],
        }


def bench_latency(
    model: str | LoadedModel,
    kv_cache_dtypes: str | Sequence[str] = "auto",
    sweep: LatencySweep | None = None,
    *,
    progress: Progress = no_progress,
    **options: Any,
) -> LatencyReport:
    """Measure each combination in each cache precision, over the same weights.

    Args:
        model: as `LLM` takes it.
        kv_cache_dtypes: precisions, each as "int8", "int8@scales.json" or "int8/fp8_e4m3".
        sweep: what else is varied.
        progress: told how many combinations are done.
        options: of the engine, as `LLM` takes them.

    Raises:
        ConfigError: for settings that cannot be served, as a batch that does not fit.
    """
    sweep = sweep or LatencySweep()
    arms = parse_arms(kv_cache_dtypes)
    config, loaded = read_options(model, options)
    _check(config, sweep)
    loaded = loaded or load_for_arms(config)
    vocabulary = Vocabulary.of(loaded.tokenizer, loaded.vocab_size)
    rows: list[LatencyRow] = []
    total = len(arms) * len([*sweep])
    for arm in arms:
        engine = make_engine(config, arm, loaded)
        for combination in sweep:
            progress("combinations", len(rows), total)
            rows.append(_measure(arm.name, engine, vocabulary, sweep, *combination))
        del engine
    return LatencyReport(loaded.name, torch.get_num_threads(), tuple(rows))


def _check(config: EngineConfig, sweep: LatencySweep) -> None:
    block_size = config.cache.block_size
    for depth in sweep.depths:
        if depth % block_size:
            raise ConfigError(
                f"--depth has {depth}: give multiples of the block size ({block_size}), since "
                "whole blocks are kept in the cache."
            )
    if any(sweep.depths) and not config.cache.enable_prefix_caching:
        raise ConfigError(
            "--depth needs the prefix cache, which keeps the tokens before the prompt: leave out "
            "--no-enable-prefix-caching."
        )
    most = config.scheduler.max_num_seqs
    if max(sweep.batch_sizes) > most:
        raise ConfigError(
            f"--batch-size has {max(sweep.batch_sizes)}, more than --max-num-seqs ({most}): lower "
            "the first or raise the second."
        )


def _measure(
    name: str,
    engine: LLMEngine,
    vocabulary: Vocabulary,
    sweep: LatencySweep,
    depth: int,
    batch_size: int,
    input_len: int,
    output_len: int,
) -> LatencyRow:
    _check_fit(engine, batch_size, depth + input_len + output_len)
    rng = random.Random(f"latency/{sweep.seed}")
    before = [vocabulary.draw(rng, depth) for _ in range(batch_size)]

    def batch() -> list[BenchRequest]:
        """The same tokens as before, and new ones after them."""
        return [
            BenchRequest((*ids, *vocabulary.draw(rng, input_len)), output_len) for ids in before
        ]

    warm_up(engine, batch())
    loads = []
    for _ in range(sweep.repetitions):
        if depth:
            # They may have been driven out by the last run's tokens; else this finds them all.
            run_load(engine, [BenchRequest((*ids, vocabulary.token_ids[0]), 1) for ids in before])
        else:
            engine.manager.reset_prefix_cache()
        loads.append(run_load(engine, batch()))
        _check_depth(loads[-1], depth)
    engine.manager.reset_prefix_cache()
    return LatencyRow(
        kv_cache_dtype=name,
        depth=depth,
        batch_size=batch_size,
        input_len=input_len,
        output_len=output_len,
        latency=MeanStd(tuple(load.seconds for load in loads)),
        prefill=MeanStd(tuple(batch_size * input_len / _phases(load)[0] for load in loads)),
        decode=MeanStd(tuple(map(_decode_rate, loads))) if output_len > 1 else None,
    )


def _check_fit(engine: LLMEngine, batch_size: int, num_tokens: int) -> None:
    if num_tokens > engine.plan.max_model_len:
        raise ConfigError(
            f"A sequence of {num_tokens} tokens (depth, prompt and answer) is longer than the "
            f"{engine.plan.max_model_len} that may be served: lower them, or raise "
            "--max-model-len or --kv-cache-memory-bytes."
        )
    # One more block each, for the token that fills the cache before the measured prompt.
    room = engine.plan.max_concurrency(num_tokens + engine.plan.block_size)
    if room < batch_size:
        raise ConfigError(
            f"A batch of {batch_size} sequences of {num_tokens} tokens does not fit: the pool has "
            f"{engine.plan.num_tokens} tokens; raise --kv-cache-memory-bytes or lower --batch-size."
        )


def _check_depth(load: Load, depth: int) -> None:
    """Raise EngineError unless the tokens before each prompt were in the cache."""
    found = min(timing.cached_tokens or 0 for timing in load.timings)
    if found < depth:
        raise EngineError(
            f"Only {found} of {depth} tokens before a prompt were still in the cache: raise "
            "--kv-cache-memory-bytes."
        )


def _phases(load: Load) -> tuple[float, float]:
    """Seconds until each sequence has its first token, and after that."""
    last_first = max(timing.token_times[0] for timing in load.timings)
    decode = max(timing.token_times[-1] for timing in load.timings) - last_first
    return load.seconds - decode, decode


def _decode_rate(load: Load) -> float:
    last_first = max(timing.token_times[0] for timing in load.timings)
    later = sum(time > last_first for timing in load.timings for time in timing.token_times)
    return later / max(_phases(load)[1], 1e-9)
