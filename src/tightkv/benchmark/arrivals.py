"""When requests are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from tightkv.errors import ConfigError

__all__ = ["check_rate", "draw_arrivals", "scaled_arrivals"]


def draw_arrivals(
    count: int, request_rate: float, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Seconds after the start at which requests are sent, drawn as `vllm bench serve` draws them.

    Gaps follow a gamma distribution of shape `burstiness` and mean `1 / request_rate`: 1 is a
    Poisson process, less is in bursts, infinity is a fixed gap. They are stretched so that the
    last request comes at `count / request_rate`.

    Raises:
        ConfigError: if the rate or the burstiness is not above 0.
    """
    check_rate(request_rate, burstiness)
    if math.isinf(request_rate):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = numpy.full(count, 1.0)
    else:
        gaps = numpy.random.default_rng(seed).gamma(burstiness, size=count)
    times = numpy.cumsum(gaps)
    if times[-1] <= 0:
        return [0.0] * count
    return [float(time) for time in times * (count / request_rate / times[-1])]


def scaled_arrivals(
    arrivals: Sequence[float], request_rate: float = math.inf, scale: float = 1.0
) -> list[float]:
    """A trace's times, stretched.

    Args:
        arrivals: seconds, in order.
        request_rate: the mean rate that they shall have; infinite: that of the trace.
        scale: factor of all times, after that.

    Raises:
        ConfigError: if the rate is not above 0, or the scale is negative or infinite.
    """
    check_rate(request_rate, 1.0)
    if not 0 <= scale < math.inf:
        raise ConfigError(f"--arrival-scale is {scale:g}: give a number from 0 on.")
    if not math.isinf(request_rate) and arrivals[-1] > 0:
        scale *= len(arrivals) / request_rate / arrivals[-1]
    return [arrival * scale for arrival in arrivals]


def check_rate(request_rate: float, burstiness: float) -> None:
    """Refuse rates that are none."""
    for name, value in (("--request-rate", request_rate), ("--burstiness", burstiness)):
        if not value > 0:
            raise ConfigError(f"{name} is {value:g}: give a number above 0, or inf.")
