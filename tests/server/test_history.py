from __future__ import annotations

import threading

import pytest

from engine_states import Clock, snapshot
from tightkv.metrics import RequestStats
from tightkv.server.history import History, Sample


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def history(clock: Clock) -> History:
    return History(lambda: snapshot(), seconds=5, clock=clock)


def test_the_running_second_is_no_sample_yet(history: History, clock: Clock) -> None:
    history.on_step(7)
    assert history.samples() == []
    clock.now = 100.99
    assert history.samples() == []
    clock.now = 101.0
    assert [sample.prompt_tokens for sample in history.samples()] == [7]


def test_tokens_of_a_step_are_prompt_or_generation(history: History, clock: Clock) -> None:
    for _ in range(2):
        history.on_tokens(_started(), 3, clock.now)
        history.on_tokens(_started(), 1, clock.now)
        history.on_step(20)
    clock.now += 1
    (sample,) = history.samples()
    assert (sample.prompt_tokens, sample.generation_tokens) == (32, 8)


def test_tokens_belong_to_the_second_that_made_them(history: History, clock: Clock) -> None:
    for now, made in ((100.2, 1), (101.0, 2), (101.9, 3), (103.5, 4)):
        clock.now = now
        history.on_tokens(_started(), made, now)
        history.on_step(made)
    clock.now = 104.1
    assert [sample.generation_tokens for sample in history.samples()] == [1, 5, 0, 4]


def test_ttft_is_the_median_of_first_tokens(history: History, clock: Clock) -> None:
    for arrival in (99.0, 99.5, 97.0):
        history.on_tokens(RequestStats(arrival_time=arrival, num_prompt_tokens=9), 1, 100.0)
    history.on_tokens(_started(), 1, 100.0)
    clock.now = 102
    first, second = history.samples()
    assert first.ttfts == [1.0, 0.5, 3.0]
    assert first.ttft == 1.0
    assert second.ttft is None


def test_only_the_last_seconds_are_kept(history: History, clock: Clock) -> None:
    for second in range(12):
        clock.now = 100 + second
        history.on_step(second)
    assert [sample.prompt_tokens for sample in history.samples()] == [6, 7, 8, 9, 10]
    clock.now = 100_000
    assert [sample.prompt_tokens for sample in history.samples()] == [0] * 5


def test_levels_are_the_engines_when_the_second_is_over(history: History, clock: Clock) -> None:
    engine = snapshot()
    clock.now = 103
    assert (
        history.samples()
        == [
            Sample(
                num_running=3,
                num_waiting=1,
                kv_usage=1 - engine.num_free_blocks / engine.num_blocks,
            )
        ]
        * 3
    )


def test_threads_lose_no_token(clock: Clock) -> None:
    history = History(lambda: snapshot(requests=()), clock=clock)

    def write() -> None:
        for _ in range(2000):
            history.on_tokens(_started(), 1, clock.now)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for _ in range(50):
        clock.now += 1
        history.samples()
    for writer in writers:
        writer.join()
    clock.now += 1
    assert sum(sample.generation_tokens for sample in history.samples()) == 8000


def _started() -> RequestStats:
    return RequestStats(arrival_time=0.0, num_prompt_tokens=9, first_token_time=1.0)
