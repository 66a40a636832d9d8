"""Figures of a load, from when its requests began and when their tokens came.

Definitions and names are those of `vllm bench serve`: TPOT = (E2EL - TTFT) / (n - 1) for answers of
two tokens and more; ITL is each gap between two tokens; percentiles lie between the nearest values;
the standard deviation is that of the values themselves (divided by their number). Times within a
run are seconds of one clock, figures are milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy

from tightkv.errors import ConfigError

__all__ = [
    "GOALS",
    "METRICS",
    "Figures",
    "RequestTiming",
    "Summary",
    "parse_goodput",
    "parse_percentiles",
    "summarize",
]

METRICS = ("ttft", "tpot", "itl", "e2el")
"""What percentiles can be asked of."""

GOALS = ("ttft", "tpot", "e2el")
"""What a goal can be set for: metrics that a request has one of."""


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One request.

    Attributes:
        start: when it was sent.
        token_times: when each piece of the answer came; usually a piece is a token.
        prompt_tokens: length of the prompt.
        output_tokens: of the answer.
        cached_tokens: of the prompt, those that a prefix cache had; None if that is not told.
        error: why there is no answer; empty if there is one.
    """

    start: float
    token_times: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.error and bool(self.token_times)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.start if self.token_times else 0.0

    @property
    def e2el(self) -> float:
        """Seconds to the last token."""
        return self.token_times[-1] - self.start if self.token_times else 0.0

    @property
    def itls(self) -> list[float]:
        """Seconds between tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is none."""
        if self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    def meets(self, goodput: Mapping[str, float]) -> bool:
        """Whether it meets all goals, in milliseconds; a single token has a TPOT of 0."""
        seconds = {"ttft": self.ttft, "tpot": self.tpot or 0.0, "e2el": self.e2el}
        return all(seconds[name] <= limit / 1e3 for name, limit in goodput.items())


@dataclass(frozen=True, slots=True)
class Summary:
    """One metric over a run, in milliseconds; all 0 if nothing was measured."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, seconds: Iterable[float], percentiles: Sequence[float]) -> Summary:
        values = 1e3 * numpy.asarray([*seconds] or [0.0])
        return cls(
            mean=float(values.mean()),
            median=float(numpy.median(values)),
            std=float(values.std()),
            percentiles={each: float(numpy.percentile(values, each)) for each in percentiles},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A run.

    Attributes:
        duration: seconds from the first request to the end of the last answer.
        total_input_tokens: of the answered requests.
        total_cached_tokens: of those, what a prefix cache had; None if no answer tells.
        request_goodput: requests per second that met all goals; None without goals.
        max_output_tokens_per_s: tokens in the busiest second.
        max_concurrent_requests: requests in the second that had most, each counted in all seconds
            that it touched.
        metrics: by name, those of `METRICS`.
        timings: of all requests, in their order.
    """

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int | None
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    metrics: Mapping[str, Summary]
    timings: tuple[RequestTiming, ...] = field(repr=False)

    def as_json(self, *, detailed: bool = False) -> dict[str, Any]:
        """The figures under the keys of vLLM's result files."""
        names = (
            *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
            *("request_throughput", "request_goodput", "output_throughput"),
            *("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
            "total_cached_tokens",
        )
        document = {name: getattr(self, name) for name in names}
        for name, summary in self.metrics.items():
            document |= {
                f"mean_{name}_ms": summary.mean,
                f"median_{name}_ms": summary.median,
                f"std_{name}_ms": summary.std,
            }
            for percent, value in summary.percentiles.items():
                document[f"p{percent:g}_{name}_ms"] = value
        return document | (self._details() if detailed else {})

    def _details(self) -> dict[str, Any]:
        return {
            "input_lens": [timing.prompt_tokens for timing in self.timings],
            "output_lens": [timing.output_tokens for timing in self.timings],
            "ttfts": [timing.ttft for timing in self.timings],
            "itls": [timing.itls for timing in self.timings],
            "latencies": [timing.e2el for timing in self.timings],
            "start_times": [timing.start for timing in self.timings],
            "errors": [timing.error for timing in self.timings],
        }


def summarize(
    timings: Sequence[RequestTiming],
    duration: float,
    *,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> Figures:
    """The figures of a run.

    Args:
        timings: of all requests.
        duration: seconds that the run took.
        percentiles: 0 to 100, of each metric.
        goodput: goals in milliseconds, as `parse_goodput` gives them.
    """
    done = [timing for timing in timings if timing.is_complete]
    inputs = sum(timing.prompt_tokens for timing in done)
    outputs = sum(timing.output_tokens for timing in done)
    cached = [timing.cached_tokens for timing in done if timing.cached_tokens is not None]
    seconds: dict[str, list[float]] = {
        "ttft": [timing.ttft for timing in done],
        "tpot": [tpot for timing in done if (tpot := timing.tpot) is not None],
        "itl": [gap for timing in done for gap in timing.itls],
        "e2el": [timing.e2el for timing in done],
    }
    most_tokens, most_requests = _busiest_seconds(done)
    return Figures(
        duration=duration,
        completed=len(done),
        failed=len(timings) - len(done),
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        total_cached_tokens=sum(cached) if cached else None,
        request_throughput=len(done) / duration,
        request_goodput=sum(t.meets(goodput) for t in done) / duration if goodput else None,
        output_throughput=outputs / duration,
        total_token_throughput=(inputs + outputs) / duration,
        max_output_tokens_per_s=float(most_tokens),
        max_concurrent_requests=most_requests,
        metrics={name: Summary.of(seconds[name], percentiles) for name in METRICS},
        timings=tuple(timings),
    )


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Goals in milliseconds, from "ttft:200" and the like.

    Raises:
        ConfigError: for another name, or what is no time.
    """
    goals: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in GOALS or not 0 <= limit < float("inf"):
            raise ConfigError(
                f"--goodput has {text!r}: give NAME:MILLISECONDS with a name of "
                f"{', '.join(GOALS)}, as ttft:200 tpot:50."
            )
        goals[name] = limit
    return goals


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Percentiles of "50,90,99".

    Raises:
        ConfigError: for what is no number from 0 to 100.
    """
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(
            f"--metric-percentiles is {text!r}: give numbers from 0 to 100 with commas, as "
            "50,90,99."
        )
    return values


def _busiest_seconds(done: Sequence[RequestTiming]) -> tuple[int, int]:
    """Most tokens and most requests of one second, counted from the first request."""
    if not done:
        return 0, 0
    begin = min(timing.start for timing in done)
    length = int(max(timing.token_times[-1] for timing in done) - begin) + 1
    tokens = numpy.zeros(length, dtype=numpy.int64)
    requests = numpy.zeros(length, dtype=numpy.int64)
    for timing in done:
        numpy.add.at(tokens, [int(time - begin) for time in timing.token_times], 1)
        requests[int(timing.start - begin) : int(timing.token_times[-1] - begin) + 1] += 1
    return int(tokens.max()), int(requests.max())
