"""Requests through an engine of this process, with the time of every token."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tightkv.benchmark.data import BenchRequest
from tightkv.benchmark.statistics import RequestTiming
from tightkv.calibration.progress import Progress, no_progress
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import ConfigError, EngineError

__all__ = ["Load", "check_requests_fit", "run_load", "warm_up"]

_WARM_UP_REQUESTS, _WARM_UP_PROMPT, _WARM_UP_ANSWER = 8, 64, 4
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What came of requests that were all there at once.

    Attributes:
        seconds: from the first step to the end of the last answer.
        peak_running: most requests in one step.
        mean_running: requests in a step, weighted by its time.
        preemptions: how often a request lost its blocks.
    """

    timings: tuple[RequestTiming, ...]
    seconds: float
    peak_running: int
    mean_running: float
    preemptions: int


class _Watched:
    """A request on its way."""

    def __init__(self, engine: LLMEngine, request: BenchRequest) -> None:
        self.times: list[float] = []
        params = SamplingParams(
            temperature=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False
        )
        request_id = f"bench-{next(_numbers)}"
        self.start = time.perf_counter()
        self.request = engine.add_request(request_id, request.token_ids, params)

    def note(self, now: float) -> bool:
        """Whether a token has come."""
        missing = self.request.sequences[0].num_output_tokens - len(self.times)
        self.times += [now] * missing
        return missing > 0

    def timing(self) -> RequestTiming:
        return RequestTiming(
            start=self.start,
            token_times=tuple(self.times),
            prompt_tokens=len(self.request.prompt_token_ids),
            output_tokens=len(self.times),
            cached_tokens=self.request.output().num_cached_tokens,
            error=self.request.error or "",
        )


def run_load(
    engine: LLMEngine,
    requests: Sequence[BenchRequest],
    progress: Progress = no_progress,
    stage: str = "",
) -> Load:
    """Answer all requests greedily, each exactly as long as asked.

    Args:
        engine: with nothing else to do.
        requests: in the order in which they wait.
        progress: told how many tokens are made, after each step.
        stage: what it is called.

    Raises:
        RequestError: if a request can never be served.
        EngineError: if one failed.
    """
    preempted = engine.stats.num_preemptions
    watched: list[_Watched] = []
    begin = time.perf_counter()
    asked = sum(request.output_len for request in requests)
    try:
        watched += (_Watched(engine, request) for request in requests)
        by_id = {each.request.request_id: each for each in watched}
        begin = before = time.perf_counter()
        made, peak, busy = 0, 0, 0.0
        while engine.has_unfinished_requests:
            touched = engine.step()
            now = time.perf_counter()
            made += sum(by_id[request.request_id].note(now) for request in touched)
            peak, busy = max(peak, len(touched)), busy + len(touched) * (now - before)
            before = now
            progress(stage, made, asked)
    except BaseException:
        for each in watched:
            engine.abort_request(each.request.request_id)
        raise
    timings = tuple(each.timing() for each in watched)
    for timing in timings:
        if timing.error:
            raise EngineError(f"A request of the benchmark failed: {timing.error}")
    return Load(
        timings=timings,
        seconds=before - begin,
        peak_running=peak,
        mean_running=busy / max(before - begin, 1e-9),
        preemptions=engine.stats.num_preemptions - preempted,
    )


def warm_up(engine: LLMEngine, requests: Sequence[BenchRequest]) -> None:
    """Run some short pieces of the requests, so that nothing is done for the first time later."""
    short = [
        BenchRequest(each.token_ids[:_WARM_UP_PROMPT], min(each.output_len, _WARM_UP_ANSWER))
        for each in requests[:_WARM_UP_REQUESTS]
    ]
    run_load(engine, short)
    engine.manager.reset_prefix_cache()


def check_requests_fit(requests: Sequence[BenchRequest], max_model_len: int) -> None:
    """Refuse requests that are longer than what is served, before they run.

    Raises:
        ConfigError: says how long the longest is.
    """
    longest = max(requests, key=lambda request: request.num_tokens)
    if longest.num_tokens > max_model_len:
        raise ConfigError(
            f"A request has {len(longest.token_ids)} + {longest.output_len} tokens, but "
            f"{max_model_len} may be served: lower --input-len or --output-len, or raise "
            "--max-model-len or --kv-cache-memory-bytes."
        )
