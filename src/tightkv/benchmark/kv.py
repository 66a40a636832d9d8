"""KV cache precisions side by side at one budget of memory: what is held, and how fast it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tightkv.benchmark.arm import read_options
from tightkv.benchmark.kv_arm import ArmJob, ArmResult, measure_arm, measure_in_process
from tightkv.benchmark.prediction import Prediction, pool_for, predict
from tightkv.benchmark.slope import break_even_context, choose_contexts
from tightkv.calibration.progress import Progress, no_progress
from tightkv.engine.arm_spec import parse_arms
from tightkv.errors import ConfigError
from tightkv.models import LoadedModel

__all__ = ["KVReport", "KVRow", "bench_kv"]

_DEFAULT_REQUESTS = 4  # that the default pool holds in the first precision
_LONGEST_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class KVRow:
    """One cache precision.

    Attributes:
        name: as it was asked for.
        result: what was measured.
        predicted: what `plan` says.
        break_even: context from which on its decode step is faster than that of the first
            precision; None if it never is, or if that was not measured.
    """

    name: str
    result: ArmResult
    predicted: Prediction
    break_even: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReport:
    """All rows; the first is what the others are compared with.

    Attributes:
        model: as it was given.
        threads: of the engine.
        pool_bytes: the budget of each precision.
        num_prompts: requests, all there at once.
        input_len: tokens of each prompt.
        output_len: tokens of each answer.
        rows: in the order asked for.
    """

    model: str
    threads: int
    pool_bytes: int
    num_prompts: int
    input_len: int
    output_len: int
    rows: tuple[KVRow, ...]

    @property
    def request_len(self) -> int:
        return self.input_len + self.output_len

    def as_json(self) -> dict[str, Any]:
        """All figures, and those of each row over the first row's."""
        return {
            "benchmark": "kv",
            "model_id": self.model,
            "threads": self.threads,
            "kv_cache_memory_bytes": self.pool_bytes,
            "num_prompts": self.num_prompts,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "rows": [self._row(row) for row in self.rows],
        }

    def _row(self, row: KVRow) -> dict[str, Any]:
        return {
            "kv_cache_dtype": row.name,
            **asdict(row.result),
            "break_even_context": row.break_even,
            "predicted": asdict(row.predicted),
            "ratios": self.ratios(row),
        }

    def ratios(self, row: KVRow) -> dict[str, float]:
        """Figures of a row over those of the first."""
        own, base = row.result, self.rows[0].result
        ratios = {
            "bytes_per_token": own.bytes_per_token / base.bytes_per_token,
            "pool_tokens": own.pool_tokens / base.pool_tokens,
            "max_requests": own.max_requests / base.max_requests,
            "peak_bytes": own.peak_bytes / base.peak_bytes,
        }
        names = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms")
        for name in names:
            if base.figures[name]:
                ratios[name] = own.figures[name] / base.figures[name]
        return ratios


def bench_kv(
    model: str | LoadedModel,
    kv_cache_dtypes: str | Sequence[str] = "float16,int8",
    *,
    num_prompts: int | None = None,
    input_len: int = 128,
    output_len: int = 1024,
    measure_slope: bool = True,
    percentiles: Sequence[float] = (50.0, 90.0, 99.0),
    seed: int = 0,
    progress: Progress = no_progress,
    **options: Any,
) -> KVReport:
    """Measure each precision in a process of its own, one after the other.

    Args:
        model: folder, hub id or GGUF file; if it is loaded already, all is measured in this
            process, and peak memory is that of all precisions so far.
        kv_cache_dtypes: precisions, each as "int8", "int8@scales.json" or "int8/fp8_e4m3"; the
            first is what the others are compared with.
        num_prompts: requests, all there at once; default: twice as many as the roomiest precision
            holds.
        input_len: tokens of each prompt, random.
        output_len: tokens of each answer.
        measure_slope: whether to time decode steps at several contexts.
        percentiles: of times.
        seed: of the prompts.
        progress: told how far each precision is.
        options: of the engine, as `LLM` takes them; `kv_cache_memory_bytes` is the budget,
            default: room for four requests in the first precision.

    Raises:
        ConfigError: for settings that cannot be served.
        CheckpointError: if the model cannot be read.
        ScaleError: for a scales file that does not fit.
    """
    arms = parse_arms(kv_cache_dtypes)
    _check_counts(num_prompts=num_prompts, input_len=input_len, output_len=output_len)
    config, loaded = read_options(model, options)
    request_len = input_len + output_len
    pool_bytes = config.cache.kv_cache_memory_bytes or pool_for(
        config, arms[0], request_len, _DEFAULT_REQUESTS
    )
    predicted = predict(config, arms, request_len, pool_bytes)
    for arm, plan in zip(arms, predicted, strict=True):
        _check_fits(arm.name, plan, request_len, pool_bytes)
    if num_prompts is None:
        num_prompts = 2 * math.ceil(max(plan.max_requests for plan in predicted))
    longest = min(_LONGEST_CONTEXT, *(plan.longest for plan in predicted))
    job = ArmJob(
        options={**options, "model": config.model.model, "kv_cache_memory_bytes": pool_bytes},
        arm="",
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        contexts=choose_contexts(longest) if measure_slope else (),
        percentiles=tuple(percentiles),
        seed=seed,
        threads=torch.get_num_threads(),
    )
    jobs = [replace(job, arm=arm.name) for arm in arms]
    results = [
        measure_in_process(each, progress)
        if loaded is None
        else measure_arm(each, loaded, progress)
        for each in jobs
    ]
    rows = (
        KVRow(arm.name, result, plan, _break_even(result, results[0]))
        for arm, result, plan in zip(arms, results, predicted, strict=True)
    )
    return KVReport(
        model=config.model.model,
        threads=job.threads,
        pool_bytes=pool_bytes,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        rows=tuple(rows),
    )


def _break_even(result: ArmResult, base: ArmResult) -> float | None:
    if result.itl is None or base.itl is None or result is base:
        return None
    return break_even_context(result.itl, base.itl)


def _check_fits(name: str, plan: Prediction, request_len: int, pool_bytes: int) -> None:
    if plan.longest < request_len:
        raise ConfigError(
            f"A request of {request_len} tokens is longer than the {plan.longest} that {name} may "
            f"serve with {pool_bytes:,} bytes of KV cache: lower --input-len or --output-len, or "
            "raise --kv-cache-memory-bytes or --max-model-len."
        )


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: give a number from 1 on.")
