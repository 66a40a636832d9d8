"""What becomes of the blocks of a preempted sequence: moved, or given up and computed anew."""

from __future__ import annotations

import logging
from typing import Protocol

from tightkv.engine.sequence import Sequence
from tightkv.errors import SwapError
from tightkv.kvcache import KVCacheManager, SwappingKVCacheManager
from tightkv.metrics import EngineStats

__all__ = ["Preemption", "Recomputation", "Swapping"]

_logger = logging.getLogger("tightkv")


class Preemption(Protocol):
    """Takes the blocks of sequences, and knows how they come back."""

    def take_blocks(self, sequence: Sequence) -> None:
        """Free a sequence's blocks; its `num_computed_tokens` says what need not be made again."""

    def is_swapped(self, sequence: Sequence) -> bool:
        """Whether its blocks were moved, and `bring_back` is to be called before it runs."""

    def bring_back(self, sequence: Sequence, num_reserved: int) -> bool:
        """Give it its blocks again, and room for all of its tokens; False: there is no room.

        `num_reserved` free blocks must be left.
        If they are lost, its `num_computed_tokens` is 0 and it holds nothing.
        """


class Recomputation:
    """Gives up the blocks: what they held is computed anew."""

    def __init__(self, manager: KVCacheManager, stats: EngineStats) -> None:
        self._manager = manager
        self._stats = stats

    def take_blocks(self, sequence: Sequence) -> None:
        self._manager.free(sequence.seq_id)
        self._stats.num_preempted_tokens += sequence.num_computed_tokens
        sequence.num_computed_tokens = 0

    def is_swapped(self, sequence: Sequence) -> bool:
        return False

    def bring_back(self, sequence: Sequence, num_reserved: int) -> bool:
        return False


class Swapping(Recomputation):
    """Moves the blocks to the swap space where that costs less."""

    def __init__(self, mode: str, manager: SwappingKVCacheManager, stats: EngineStats) -> None:
        """Args: mode, a `preemption_mode`; manager and stats of the engine."""
        super().__init__(manager, stats)
        self._mode = mode
        self._swapping = manager

    def take_blocks(self, sequence: Sequence) -> None:
        if not self._prefers_swap(sequence):
            super().take_blocks(sequence)
        elif self._swapping.swap_out(
            sequence.seq_id, sequence.token_ids, sequence.num_computed_tokens
        ):
            self._stats.num_swaps += 1
        else:
            self._stats.num_swap_fallbacks += 1
            super().take_blocks(sequence)

    def is_swapped(self, sequence: Sequence) -> bool:
        return self._swapping.is_swapped(sequence.seq_id)

    def bring_back(self, sequence: Sequence, num_reserved: int) -> bool:
        try:
            return self._swapping.swap_in(
                sequence.seq_id,
                sequence.hasher,
                sequence.token_ids,
                sequence.num_computed_tokens,
                num_reserved=num_reserved,
            )
        except SwapError:
            self._stats.num_swap_fallbacks += 1
            self._stats.num_preempted_tokens += sequence.num_computed_tokens
            sequence.num_computed_tokens = 0
            return False

    def _prefers_swap(self, sequence: Sequence) -> bool:
        num_tokens = sequence.num_computed_tokens
        if num_tokens == 0:
            return False
        count = self._manager.blocks_seen(num_tokens)
        space = self._swapping.swap_space
        swaps = self._mode != "recompute" and space.prefers_swap(count, count, num_tokens)
        if _logger.isEnabledFor(logging.DEBUG):
            num_bytes = count * space.slot_bytes
            _logger.debug(
                "Preempted %s: %s (mode %s; %s bytes out and in %.1f ms, %d tokens anew %.1f ms)",
                sequence.seq_id,
                "swap" if swaps else "recompute",
                self._mode,
                f"{num_bytes:,}",
                1e3 * space.costs.seconds_to_swap(num_bytes, num_bytes),
                num_tokens,
                1e3 * space.costs.seconds_to_compute(num_tokens),
            )
        return swaps
