"""Tells an answer that has fallen into a loop, which is how a broken KV cache often shows."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["has_repetition_loop"]

_LONGEST_PERIOD = 64


def has_repetition_loop(
    token_ids: Sequence[int], *, least_tokens: int = 64, least_periods: int = 4
) -> bool:
    """Whether the last tokens of an answer are one n-gram, over and over.

    That is: with some period of at most 64 tokens, the tail that repeats it is long enough in
    tokens and in periods; the last copy may be cut. Honest answers repeat as well: rules of a
    table, lists of equal entries, refrains. They are shorter, or something follows them, if only
    the end-of-sequence token; a loop goes on until max_tokens cuts it. By default 64 tokens let a
    row of dashes or zeros pass, and 64 tokens of period are a long sentence.

    Args:
        token_ids: of the answer alone, with its end-of-sequence token if it has one.
        least_tokens: of the tail that repeats.
        least_periods: of the same tail; at least 2.
    """
    tail = token_ids[-max(_LONGEST_PERIOD * least_periods, least_tokens) :]
    return any(
        _repeats(tail, period, max(least_tokens, least_periods * period))
        for period in range(1, _LONGEST_PERIOD + 1)
    )


def _repeats(tail: Sequence[int], period: int, num_tokens: int) -> bool:
    """Whether the last `num_tokens` tokens have this period."""
    end = len(tail)
    if num_tokens > end:
        return False
    return all(
        tail[i] == tail[i - period] for i in range(end - 1, end - num_tokens + period - 1, -1)
    )
