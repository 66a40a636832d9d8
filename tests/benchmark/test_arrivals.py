"""When requests are sent."""

from __future__ import annotations

import math

import numpy
import pytest

from tightkv.benchmark.arrivals import draw_arrivals, scaled_arrivals
from tightkv.errors import ConfigError


def test_all_at_once_without_a_rate() -> None:
    assert draw_arrivals(3, math.inf) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0, math.inf])
def test_the_rate_is_kept_and_gaps_are_as_bursty_as_asked(burstiness: float) -> None:
    times = numpy.asarray(draw_arrivals(4000, 8.0, burstiness, seed=1))
    assert times[-1] == pytest.approx(4000 / 8.0)
    gaps = numpy.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    # A gamma distribution of shape b has a coefficient of variation of 1 / sqrt(b).
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.1, abs=1e-9)


def test_the_seed_decides() -> None:
    assert draw_arrivals(9, 1.0, seed=1) == draw_arrivals(9, 1.0, seed=1)
    assert draw_arrivals(9, 1.0, seed=1) != draw_arrivals(9, 1.0, seed=2)


def test_times_of_a_trace_are_stretched() -> None:
    assert scaled_arrivals([0.0, 1.0, 4.0]) == [0.0, 1.0, 4.0]
    assert scaled_arrivals([0.0, 1.0, 4.0], scale=0.5) == [0.0, 0.5, 2.0]
    assert scaled_arrivals([0.0, 1.0, 4.0], request_rate=0.5) == [0.0, 1.5, 6.0]
    assert scaled_arrivals([0.0, 0.0], request_rate=0.5) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("rate", "burstiness", "said"),
    [(0, 1, "--request-rate is 0"), (math.nan, 1, "--request-rate"), (1, -1, "--burstiness is -1")],
)
def test_what_is_no_rate(rate: float, burstiness: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        draw_arrivals(3, rate, burstiness)


def test_what_is_no_scale() -> None:
    with pytest.raises(ConfigError, match="--arrival-scale is -1"):
        scaled_arrivals([0.0], scale=-1)
