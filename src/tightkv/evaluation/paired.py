"""Two arms' scores of the same items: how large the difference is, and whether it can be shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tightkv.evaluation.report import TaskFigures

__all__ = ["bootstrap_interval", "compare_items", "mcnemar_interval", "mcnemar_p_value"]

_Z = 1.959963984540054  # 97.5 % quantile of the normal distribution
_TAIL = 0.025
_NUM_RESAMPLES = 10_000
_RESAMPLED_AT_ONCE = 1_000_000  # numbers
_FEWEST = 10
"""With fewer items their own spread says too little to resample them."""

Values = npt.NDArray[np.float64]


def compare_items(
    task: str, metric: str, base: Sequence[float], arm: Sequence[float], seed: int
) -> TaskFigures:
    """Compare in pairs.

    Items that are right (1) or wrong (0) by McNemar's exact test, others by the bootstrap.

    Args:
        task, metric: names.
        base, arm: scores of the same items in the same order, at least one; more is better.
        seed: of the bootstrap.
    """
    scores = np.array([base, arm], np.float64)
    drops = scores[0] - scores[1]
    only_base, only_arm = int((drops > 0).sum()), int((drops < 0).sum())
    if np.isin(scores, (0, 1)).all():
        p_value = mcnemar_p_value(only_base, only_arm)
        low, high = mcnemar_interval(only_base, only_arm, len(drops))
        test = "McNemar, exact; interval: Bonett-Price, and the exact one of the discordant pairs"
    elif len(drops) < _FEWEST:
        p_value, low, high = 1.0, min(0.0, drops.min()), max(0.0, drops.max())
        test = f"none with fewer than {_FEWEST} items; interval: all differences"
    else:
        p_value, low, high = bootstrap_interval(drops, seed)
        test = f"paired bootstrap, {_NUM_RESAMPLES:,} resamples"
    return TaskFigures(
        task=task,
        metric=metric,
        num_items=len(drops),
        score=float(scores[1].mean()),
        score_base=float(scores[0].mean()),
        only_base=only_base,
        only_arm=only_arm,
        drop=float(drops.mean()),
        drop_low=float(low),
        drop_high=float(high),
        p_value=p_value,
        test=test,
        conclusion=_conclusion(scores, float(drops.mean()), float(low), float(high)),
    )


def mcnemar_p_value(only_base: int, only_arm: int) -> float:
    """Two-sided exact test (McNemar 1947) that the discordant pairs fall to both sides alike."""
    return min(1.0, 2 * _at_most(min(only_base, only_arm), only_base + only_arm, 0.5))


def mcnemar_interval(only_base: int, only_arm: int, num_items: int) -> tuple[float, float]:
    """95 % interval of the drop of the share of right items.

    The wider, at each end, of two: that of Bonett and Price (2012, doi:10.3102/1076998611411915),
    which also knows that the number of discordant pairs is a chance; and the exact one (Clopper
    and Pearson 1934) of the share of discordant pairs that fall to the baseline, which leaves 0
    out just when McNemar's exact test finds p < 0.05. So interval and test say the same.
    """
    share_base, share_arm = (only_base + 1) / (num_items + 2), (only_arm + 1) / (num_items + 2)
    centre = share_base - share_arm
    half = _Z * math.sqrt((share_base + share_arm - centre**2) / (num_items + 2))
    discordant = only_base + only_arm
    exact_low = discordant / num_items * (2 * _lower_share(only_base, discordant) - 1)
    exact_high = discordant / num_items * (1 - 2 * _lower_share(only_arm, discordant))
    return max(-1.0, min(centre - half, exact_low)), min(1.0, max(centre + half, exact_high))


def bootstrap_interval(drops: Values, seed: int) -> tuple[float, float, float]:
    """p-value and 95 % percentile interval of the mean (Efron 1979), from the same resamples."""
    random = np.random.default_rng(seed)
    at_once = max(1, _RESAMPLED_AT_ONCE // len(drops))
    means = np.concatenate(
        [
            drops[
                random.integers(0, len(drops), (min(at_once, _NUM_RESAMPLES - start), len(drops)))
            ].mean(axis=1)
            for start in range(0, _NUM_RESAMPLES, at_once)
        ]
    )
    beyond = min((means <= 0).sum(), (means >= 0).sum())
    low, high = np.quantile(means, (_TAIL, 1 - _TAIL))
    return float(min(1.0, 2 * (beyond + 1) / (_NUM_RESAMPLES + 1))), float(low), float(high)


def _at_most(successes: int, trials: int, share: float) -> float:
    """Of a binomial distribution."""
    if share <= 0 or share >= 1:
        return float(share <= 0 or successes >= trials)
    logs = [
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(share)
        + (trials - k) * math.log1p(-share)
        for k in range(successes + 1)
    ]
    return math.fsum(map(math.exp, logs))


def _lower_share(successes: int, trials: int) -> float:
    """The share under which so many successes or more have a probability of 2.5 %."""
    if successes == 0:
        return 0.0
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if 1 - _at_most(successes - 1, trials, middle) < _TAIL:
            low = middle
        else:
            high = middle
    return low


def _conclusion(scores: Values, drop: float, low: float, high: float) -> str:
    is_share = bool(((scores >= 0) & (scores <= 1)).all())

    def amount(value: float) -> str:
        return f"{round(100 * value, 1) + 0.0:.1f}" if is_share else f"{value:.4g}"

    unit = " points" if is_share else ""
    count = scores.shape[1]
    if low > 0:
        interval = f"95 % interval {amount(low)} to {amount(high)}"
        return f"loses {amount(drop)}{unit} at n = {count} ({interval})"
    if high < 0:
        interval = f"95 % interval {amount(-high)} to {amount(-low)}"
        return f"gains {amount(-drop)}{unit} at n = {count} ({interval})"
    interval = f"95 % interval {amount(low)} to {amount(high)}"
    return f"no difference could be shown at n = {count} (drop {amount(drop)}{unit}, {interval})"
