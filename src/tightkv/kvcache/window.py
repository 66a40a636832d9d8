"""Which blocks of a sequence the layers of a group need: all, or those that a window still sees.

A query at position p sees the keys above `p - window`, itself included.
"""

from __future__ import annotations

__all__ = ["first_block", "most_blocks", "passing_position"]


def first_block(window: int | None, position: int, block_size: int) -> int:
    """Index of the first block that queries at `position` and later see."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def passing_position(window: int, block: int, block_size: int) -> int:
    """The first position at which queries, and those later, do not see a block any more."""
    return (block + 1) * block_size + window - 1


def most_blocks(window: int | None, num_tokens: int, block_size: int, max_chunk: int = 1) -> int:
    """Blocks that a sequence of `num_tokens` tokens holds at most.

    The queries of a chunk see `window + max_chunk - 1` tokens together, of which the first can be
    the last one of its block.

    Args:
        window: of the layers; None: full attention.
        num_tokens: of the sequence.
        block_size: tokens per block.
        max_chunk: tokens that one step computes at most; 1 while the sequence decodes.
    """
    blocks = -(-num_tokens // block_size)
    if window is None:
        return blocks
    return min(blocks, -(-(window + max_chunk - 2) // block_size) + 1)
