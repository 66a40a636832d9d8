"""One cache precision, measured in this process or in one of its own.

In a process of its own, peak memory is that of this precision alone. The peak counts from after the
weights are loaded, which takes more than serving a small model does.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tightkv import errors
from tightkv.benchmark.arm import load_for_arms, make_engine
from tightkv.benchmark.data import DatasetConfig, Vocabulary, make_requests
from tightkv.benchmark.offline import check_requests_fit, run_load, warm_up
from tightkv.benchmark.process_memory import forget_peak, peak_bytes
from tightkv.benchmark.slope import ItlLine, measure_itl
from tightkv.benchmark.statistics import summarize
from tightkv.calibration.progress import Progress, no_progress
from tightkv.config import EngineConfig
from tightkv.engine.arm_spec import parse_arm
from tightkv.errors import EngineError, TightKVError
from tightkv.formats import TensorFormat
from tightkv.models import LoadedModel

__all__ = ["ArmJob", "ArmResult", "measure_arm", "measure_in_process"]

_WORKER = "tightkv.benchmark.kv_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmJob:
    """What is to be measured.

    Attributes:
        options: of the engine, as `EngineConfig.from_options` takes them.
        arm: the cache precision, as it was written.
        num_prompts: requests, all there at once.
        input_len: tokens of each prompt.
        output_len: tokens of each answer.
        contexts: at which a decode step is timed; none: it is not.
        percentiles: of times.
        seed: of the prompts.
        threads: of the engine.
    """

    options: Mapping[str, Any]
    arm: str
    num_prompts: int
    input_len: int
    output_len: int
    contexts: tuple[int, ...]
    percentiles: tuple[float, ...]
    seed: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """What was measured.

    Attributes:
        k_format: of K, in words.
        v_format: of V.
        bytes_per_token: in all layers.
        pool_bytes: as allocated.
        pool_tokens: that the pool holds in all layers, as if none had left a window.
        max_requests: of the asked length that fit at once.
        figures: of the load, under the keys of vLLM's result files.
        peak_running: most requests in one step.
        mean_running: requests in a step, weighted by its time.
        preemptions: how often a request lost its blocks.
        itl: time of a decode step by context; None if it was not measured.
        peak_bytes: most memory that the process held while it served.
        peak_is_since_load: whether that leaves out what loading took.
    """

    k_format: str
    v_format: str
    bytes_per_token: float
    pool_bytes: int
    pool_tokens: int
    max_requests: float
    figures: Mapping[str, Any]
    peak_running: int
    mean_running: float
    preemptions: int
    itl: ItlLine | None
    peak_bytes: int
    peak_is_since_load: bool


def measure_arm(
    job: ArmJob, model: LoadedModel | None = None, progress: Progress = no_progress
) -> ArmResult:
    """Measure in this process.

    Args:
        job: what.
        model: loaded already.
        progress: told how many tokens are made.

    Raises:
        ConfigError, CheckpointError, ScaleError: as an engine would.
    """
    torch.set_num_threads(job.threads)
    config = EngineConfig.from_options(job.options)
    progress(f"{job.arm}: loading", 0, 1)
    model = model or load_for_arms(config)
    engine = make_engine(config, parse_arm(job.arm), model)
    progress(f"{job.arm}: loading", 1, 1)
    vocabulary = Vocabulary.of(model.tokenizer, model.vocab_size)
    data = DatasetConfig(
        num_prompts=job.num_prompts,
        input_len=job.input_len,
        output_len=job.output_len,
        seed=job.seed,
    )
    requests = make_requests(data, vocabulary)
    check_requests_fit(requests, engine.plan.max_model_len)
    is_since_load = forget_peak()
    warm_up(engine, requests)
    load = run_load(engine, requests, progress, f"{job.arm}: {job.num_prompts} requests")
    engine.manager.reset_prefix_cache()
    itl = None
    if job.contexts:
        itl = measure_itl(engine, vocabulary, job.contexts, progress, f"{job.arm}: decode steps")
    specs = [spec for group in engine.storage.groups for spec in group.specs]
    return ArmResult(
        k_format=_described(spec.k_format for spec in specs),
        v_format=_described(spec.v_format for spec in specs),
        bytes_per_token=engine.plan.bytes_per_token,
        pool_bytes=engine.storage.num_bytes,
        pool_tokens=engine.plan.num_tokens,
        max_requests=engine.plan.max_concurrency(job.input_len + job.output_len),
        figures=summarize(load.timings, load.seconds, percentiles=job.percentiles).as_json(),
        peak_running=load.peak_running,
        mean_running=load.mean_running,
        preemptions=load.preemptions,
        itl=itl,
        peak_bytes=peak_bytes(),
        peak_is_since_load=is_since_load,
    )


def _described(formats: Iterable[TensorFormat]) -> str:
    """The formats of all layers, each once."""
    return "; ".join(dict.fromkeys(each.describe() for each in formats))


def measure_in_process(job: ArmJob, progress: Progress = no_progress) -> ArmResult:
    """Measure in a new process; arguments and errors as in `measure_arm`.

    Raises:
        EngineError: also if the process ends without a result.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the other
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin as jobs:
            jobs.write(json.dumps(asdict(job)))
        with process.stdout as lines:
            for line in lines:
                message = _message(line)
                if "progress" in message:
                    progress(*message["progress"])
                elif "error" in message:
                    kind: type[TightKVError] = getattr(errors, message["kind"], EngineError)
                    raise kind(message["error"])
                elif "result" in message:
                    return _result(message["result"])
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    raise EngineError(
        f"The process that measured {job.arm} ended with status {status} and no result: give it "
        "more memory, or see what it wrote above."
    )


def _message(line: str) -> Mapping[str, Any]:
    """A line of the process; libraries may write others between."""
    with contextlib.suppress(json.JSONDecodeError):
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    return {}


def _result(document: dict[str, Any]) -> ArmResult:
    itl = document.pop("itl")
    return ArmResult(**document, itl=ItlLine(**itl) if itl else None)
