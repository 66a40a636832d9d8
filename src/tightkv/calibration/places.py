"""Where windows of text are put: all over the positions that will be served.

RoPE turns channels of K, some of them so slowly that what they reach late is never seen early. What
attention computes does not depend on where a window stands, so a short one can be put anywhere, and
a text of short windows shows what K is like at all positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Place", "spread"]


@dataclass(frozen=True, slots=True)
class Place:
    """A window of token ids and the position of its first token."""

    token_ids: Sequence[int]
    first_position: int

    @property
    def positions(self) -> torch.Tensor:
        """int64 `[num_tokens]`."""
        return self.first_position + torch.arange(len(self.token_ids))


def spread(windows: Sequence[Sequence[int]], max_model_len: int, at_least: int) -> list[Place]:
    """Each window at a place of its own, from the first positions to the last ones.

    Args:
        windows: token ids.
        max_model_len: positions that will be served.
        at_least: places to have; fewer windows take several each.
    """
    count = max(len(windows), at_least)
    last = max(0, max_model_len - max(map(len, windows)))
    steps = max(1, count - 1)
    return [Place(windows[i % len(windows)], last * i // steps) for i in range(count)]
