"""Paired statistics, against values worked out by hand, by enumeration, and by scipy."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from tightkv.evaluation.paired import (
    bootstrap_interval,
    compare_items,
    mcnemar_interval,
    mcnemar_p_value,
)


def items(
    both: int, only_base: int, only_arm: int, neither: int
) -> tuple[list[float], list[float]]:
    base = [1.0] * (both + only_base) + [0.0] * (only_arm + neither)
    arm = [1.0] * both + [0.0] * only_base + [1.0] * only_arm + [0.0] * neither
    return base, arm


@pytest.mark.parametrize(
    ("only_base", "only_arm", "expected"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),  # 2 * 42 / 64, cut to 1
        (1, 0, 1.0),
        (5, 0, 2 / 32),
        (0, 6, 2 / 64),
        (8, 2, 2 * (1 + 10 + 45) / 1024),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
    ],
)
def test_mcnemar_by_hand(only_base: int, only_arm: int, expected: float) -> None:
    assert mcnemar_p_value(only_base, only_arm) == pytest.approx(expected, rel=1e-12)


def test_interval_by_hand() -> None:
    # Bonett and Price with 6 and 0 of 64: (7 + 1) / 66 pairs differ, by 6 / 66.
    half = 1.959964 * math.sqrt((8 / 66 - (6 / 66) ** 2) / 66)
    low, high = mcnemar_interval(6, 0, 64)
    assert high == pytest.approx(6 / 66 + half, abs=1e-6)
    # Clopper and Pearson with 6 of 6: the lower share is 0.025 ** (1 / 6).
    exact = 6 / 64 * (2 * 0.025 ** (1 / 6) - 1)
    assert low == pytest.approx(min(6 / 66 - half, exact), abs=1e-9)


def test_no_discordant_pair_still_leaves_doubt() -> None:
    half = 1.959964 * math.sqrt(2 / 66 / 66)
    assert mcnemar_interval(0, 0, 64) == pytest.approx((-half, half), abs=1e-6)


def test_interval_and_test_say_the_same() -> None:
    for only_base, only_arm, extra in product(range(10), range(10), (0, 3, 100)):
        num_items = only_base + only_arm + extra
        if num_items == 0:
            continue
        low, high = mcnemar_interval(only_base, only_arm, num_items)
        is_shown = low > 0 or high < 0
        assert is_shown == (mcnemar_p_value(only_base, only_arm) < 0.05)
        assert -1 <= low <= (only_base - only_arm) / num_items <= high <= 1
        mirrored = mcnemar_interval(only_arm, only_base, num_items)
        assert (low, high) == pytest.approx((-mirrored[1], -mirrored[0]), abs=1e-12)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    # 12 % of the items are lost, 6 % won: the true drop is 6 points.
    counts = random.multinomial(100, [0.12, 0.06, 0.82], size=500)
    inside = [
        low <= 0.06 <= high
        for low, high in (mcnemar_interval(int(b), int(c), 100) for b, c, _ in counts)
    ]
    assert 0.94 <= np.mean(inside) <= 0.995


def test_scipy_agrees() -> None:
    stats = pytest.importorskip("scipy.stats")
    for only_base, only_arm in ((0, 1), (7, 3), (40, 61), (300, 351)):
        total = only_base + only_arm
        found = stats.binomtest(only_base, total)
        assert mcnemar_p_value(only_base, only_arm) == pytest.approx(found.pvalue, rel=1e-9)
        # Many more pairs that agree: there the exact interval is the wider one or equal.
        low, high = mcnemar_interval(only_base, only_arm, total)
        share = found.proportion_ci(method="exact")
        assert low <= 2 * share.low - 1 + 1e-9
        assert high >= 2 * share.high - 1 - 1e-9


def test_bootstrap_against_the_normal_approximation() -> None:
    drops = np.random.default_rng(1).normal(0.3, 1.0, 400)
    p_value, low, high = bootstrap_interval(drops, seed=0)
    half = 1.959964 * drops.std() / 20
    assert (low, high) == pytest.approx((drops.mean() - half, drops.mean() + half), abs=0.01)
    assert p_value == pytest.approx(2 / 10_001, abs=1e-9)  # no resample is below 0
    assert bootstrap_interval(drops, seed=0) == (p_value, low, high)
    assert bootstrap_interval(drops, seed=1) != (p_value, low, high)


def test_bootstrap_takes_the_same_numbers_in_parts() -> None:
    drops = np.random.default_rng(2).normal(0.0, 1.0, 5000)
    p_value, low, high = bootstrap_interval(drops, seed=0)
    assert low < drops.mean() < high
    assert 0.05 < p_value <= 1


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ((30, 2, 1, 31), "no difference could be shown at n = 64 (drop 1.6 points, 95 % interval "),
        ((30, 0, 0, 34), "no difference could be shown at n = 64 (drop 0.0 points, 95 % interval "),
        ((30, 6, 0, 28), "loses 9.4 points at n = 64 (95 % interval 0."),
        ((30, 0, 6, 28), "gains 9.4 points at n = 64 (95 % interval 0."),
    ],
)
def test_conclusions(cells: tuple[int, int, int, int], said: str) -> None:
    figures = compare_items("gsm8k", "acc", *items(*cells), seed=0)
    assert figures.conclusion.startswith(said)
    assert (figures.only_base, figures.only_arm) == cells[1:3]
    assert figures.num_items == 64
    assert figures.score_base == pytest.approx((cells[0] + cells[1]) / 64)
    assert figures.drop == pytest.approx((cells[1] - cells[2]) / 64)


def test_scores_that_are_no_shares() -> None:
    base = [-10.0 + index % 3 for index in range(30)]
    arm = [score - 0.5 - 0.01 * (index % 2) for index, score in enumerate(base)]
    figures = compare_items("wikitext", "log", base, arm, seed=0)
    assert figures.conclusion.startswith("loses 0.505 at n = 30 (95 % interval 0.50")
    assert "bootstrap" in figures.test
    assert figures.only_base == 30


def test_few_items_prove_nothing() -> None:
    figures = compare_items("wikitext", "log", [1.5, 2.5, 3.5], [1.0, 2.0, 3.25], seed=0)
    assert figures.conclusion.startswith("no difference could be shown at n = 3")
    assert (figures.drop_low, figures.drop_high, figures.p_value) == (0.0, 0.5, 1.0)
