"""Which answers count as loops."""

from __future__ import annotations

import random

import pytest

from tightkv.metrics.repetition import has_repetition_loop

PROSE = random.Random(0).sample(range(5000), 400)


@pytest.mark.parametrize("period", [1, 2, 7, 16, 40, 64])
@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("before", [0, 300])
def test_a_loop(period: int, cut: int, before: int) -> None:
    copies = max(64 // period, 4) + 1
    loop = (PROSE[:period] * copies)[: copies * period - cut * (period // 2)]
    assert has_repetition_loop(PROSE[100 : 100 + before] + loop)


@pytest.mark.parametrize("period", [1, 16, 64])
def test_just_long_enough_and_one_token_short(period: int) -> None:
    num_tokens = max(64, 4 * period)
    loop = (PROSE[:period] * num_tokens)[-num_tokens:]
    assert has_repetition_loop([9999, *loop])
    assert not has_repetition_loop([9999, *loop[1:]])


@pytest.mark.parametrize("period", [1, 8, 20, 64])
def test_a_shorter_loop_where_asked_for(period: int) -> None:
    num_tokens = max(24, 3 * period)
    loop = (PROSE[:period] * num_tokens)[-num_tokens:]
    assert not has_repetition_loop([9999, *loop])
    assert has_repetition_loop([9999, *loop], least_tokens=24, least_periods=3)
    assert not has_repetition_loop([9999, *loop[1:]], least_tokens=24, least_periods=3)


def test_a_longer_loop_where_asked_for() -> None:
    assert has_repetition_loop([7] * 300, least_tokens=300)
    assert not has_repetition_loop([7] * 299, least_tokens=300)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([], "empty"),
        (PROSE, "prose"),
        ([7] * 40, "a row of dashes"),
        (PROSE[:20] + [7] * 63, "a long row of dashes"),
        (PROSE[:65] * 6, "a paragraph that comes again"),
        (PROSE[:30] * 3, "a refrain"),
        ([7] * 200 + [2], "zeros, and then the end-of-sequence token"),
        ([token for i in range(60) for token in (11, 12, 100 + i)], "a numbered list"),
        ([1, 2] * 100 + PROSE[:1], "something follows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_loop(answer: list[int], why: str) -> None:
    assert not has_repetition_loop(answer), why
