"""How many tokens an engine makes per second of many requests that are all there at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tightkv.benchmark.arm import load_for_arms, make_engine, read_options
from tightkv.benchmark.data import DatasetConfig, Vocabulary, make_requests
from tightkv.benchmark.offline import check_requests_fit, run_load, warm_up
from tightkv.benchmark.statistics import Figures, summarize
from tightkv.benchmark.sweep import MeanStd
from tightkv.calibration.progress import Progress, no_progress
from tightkv.engine.arm_spec import parse_arms
from tightkv.engine.llm_engine import LLMEngine
from tightkv.models import LoadedModel

__all__ = ["ThroughputReport", "ThroughputRow", "bench_throughput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputRow:
    """One cache precision.

    Attributes:
        pool_tokens: that the pool holds.
        num_requests: of a repetition.
        num_prompt_tokens: of all of them.
        num_output_tokens: of all answers.
        seconds: a repetition took.
        requests_per_second: answered.
        tokens_per_second: of prompts and answers.
        output_tokens_per_second: of answers alone.
        peak_running: most requests in one step, in any repetition.
        preemptions: in all repetitions.
        runs: the figures of each repetition.
    """

    kv_cache_dtype: str
    pool_tokens: int
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: MeanStd
    requests_per_second: MeanStd
    tokens_per_second: MeanStd
    output_tokens_per_second: MeanStd
    peak_running: int
    preemptions: int
    runs: tuple[Figures, ...]

    def as_json(self) -> dict[str, Any]:
        """Means under the keys of `vllm bench throughput`, and their samples."""
        return {
            "kv_cache_dtype": self.kv_cache_dtype,
            "pool_tokens": self.pool_tokens,
            "elapsed_time": self.seconds.mean,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "requests_per_second": self.requests_per_second.mean,
            "tokens_per_second": self.tokens_per_second.mean,
            "output_tokens_per_second": self.output_tokens_per_second.mean,
            **self.output_tokens_per_second.as_json("ts"),
            "peak_running": self.peak_running,
            "preemptions": self.preemptions,
            "runs": [run.as_json() for run in self.runs],
        }


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """All rows, and what they were measured with."""

    model: str
    threads: int
    dataset: str
    rows: tuple[ThroughputRow, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": "throughput",
            "model_id": self.model,
            "threads": self.threads,
            "dataset": self.dataset,
            "rows": [row.as_json() for row in self.rows],
        }


def bench_throughput(
    model: str | LoadedModel,
    kv_cache_dtypes: str | Sequence[str] = "auto",
    data: DatasetConfig | None = None,
    *,
    repetitions: int = 1,
    percentiles: Sequence[float] = (50.0, 99.0),
    progress: Progress = no_progress,
    **options: Any,
) -> ThroughputReport:
    """Measure each cache precision, one after the other, over the same weights.

    The prefix cache is emptied before each repetition, so that none finds what another has left.

    Args:
        model: as `LLM` takes it.
        kv_cache_dtypes: precisions, each as "int8", "int8@scales.json" or "int8/fp8_e4m3".
        data: what is asked; with no `max_request_len`, that of the engine.
        repetitions: of each; random data is drawn anew for each.
        percentiles: of the times of requests.
        progress: told how many tokens are made.
        options: of the engine, as `LLM` takes them.

    Raises:
        ConfigError: for settings or data that cannot be served.
        RequestError: for data that cannot be read.
    """
    data = data or DatasetConfig()
    data.check()
    arms = parse_arms(kv_cache_dtypes)
    config, loaded = read_options(model, options)
    loaded = loaded or load_for_arms(config)
    vocabulary = Vocabulary.of(loaded.tokenizer, loaded.vocab_size)
    rows = []
    for arm in arms:
        engine = make_engine(config, arm, loaded)
        rows.append(
            _measure(arm.name, engine, vocabulary, data, repetitions, percentiles, progress)
        )
        del engine
    return ThroughputReport(loaded.name, torch.get_num_threads(), data.name, tuple(rows))


def _measure(
    name: str,
    engine: LLMEngine,
    vocabulary: Vocabulary,
    data: DatasetConfig,
    repetitions: int,
    percentiles: Sequence[float],
    progress: Progress,
) -> ThroughputRow:
    limit = data.max_request_len or engine.plan.max_model_len
    runs, peak, preemptions = [], 0, 0
    for repetition in range(repetitions):
        drawn = replace(data, seed=data.seed + repetition, max_request_len=limit)
        requests = make_requests(drawn, vocabulary)
        check_requests_fit(requests, engine.plan.max_model_len)
        if not repetition:
            warm_up(engine, requests)
        engine.manager.reset_prefix_cache()
        load = run_load(
            engine, requests, progress, f"{name}, run {repetition + 1} of {repetitions}"
        )
        peak, preemptions = max(peak, load.peak_running), preemptions + load.preemptions
        runs.append(summarize(load.timings, load.seconds, percentiles=percentiles))
    return ThroughputRow(
        kv_cache_dtype=name,
        pool_tokens=engine.plan.num_tokens,
        num_requests=len(requests),
        num_prompt_tokens=runs[-1].total_input_tokens,
        num_output_tokens=runs[-1].total_output_tokens,
        seconds=MeanStd(tuple(run.duration for run in runs)),
        requests_per_second=MeanStd(tuple(run.request_throughput for run in runs)),
        tokens_per_second=MeanStd(tuple(run.total_token_throughput for run in runs)),
        output_tokens_per_second=MeanStd(tuple(run.output_throughput for run in runs)),
        peak_running=peak,
        preemptions=preemptions,
        runs=tuple(runs),
    )
