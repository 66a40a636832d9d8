"""How many bytes of the pool sequences hold, by their length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tightkv.kvcache import LayerGroup, most_blocks

__all__ = ["Footprint", "tokens_in"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What sequences hold in a pool.

    Attributes:
        groups: per layer group its window and the bytes of one of its blocks.
        block_size: tokens per block.
        max_chunk: tokens that a step computes at most; while they are, a group with a window
            holds blocks for all of them.
    """

    groups: tuple[tuple[int | None, int], ...]
    block_size: int
    max_chunk: int = 1

    @classmethod
    def of(cls, groups: Iterable[LayerGroup], block_size: int, max_chunk: int) -> Footprint:
        """That of TightKV's own pool, whose block ids are pages."""
        sizes = tuple((group.sliding_window, group.page_bytes) for group in groups)
        return cls(sizes, block_size, max_chunk)

    @property
    def bytes_per_token(self) -> float:
        """Of one token in all layers, padding included."""
        return sum(size for _, size in self.groups) / self.block_size

    def most(self, num_tokens: int) -> int:
        """Bytes that one sequence of `num_tokens` tokens holds at most."""
        return self._held(num_tokens, self.max_chunk)

    def of_sequences(self, number: int, num_tokens: int) -> int:
        """Bytes that hold `number` sequences at once: one computes a chunk, the others decode."""
        return self.most(num_tokens) + (number - 1) * self._held(num_tokens, 1)

    def sequences(self, num_bytes: int, num_tokens: int) -> float:
        """Sequences of `num_tokens` tokens that so many bytes hold at once."""
        most, each = self.most(num_tokens), self._held(num_tokens, 1)
        if num_bytes < most:
            return num_bytes / most
        return (num_bytes - (most - each)) / each

    def longest(self, num_bytes: int, limit: int) -> int:
        """Tokens of the longest sequence that so many bytes hold, `limit` at most."""
        low, high = 0, -(-limit // self.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.most(middle * self.block_size) <= num_bytes:
                low = middle
            else:
                high = middle - 1
        return min(low * self.block_size, limit)

    def _held(self, num_tokens: int, max_chunk: int) -> int:
        return sum(
            size * most_blocks(window, num_tokens, self.block_size, max_chunk)
            for window, size in self.groups
        )


def tokens_in(num_blocks: int, num_groups: int, block_size: int) -> int:
    """Tokens that so many block ids hold in all layer groups, as if none had left a window."""
    return num_blocks // num_groups * block_size
