"""Blocks outside the pool: those of preempted sequences, and what the prefix cache gave up."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import numpy
import torch

from tightkv.errors import ConfigError, SwapError
from tightkv.kvcache.block_pool import BlockPool
from tightkv.kvcache.storage import KVCacheStorage
from tightkv.kvcache.swap_costs import SwapCosts
from tightkv.kvcache.swap_memory import GIB, SwapMemory
from tightkv.metrics import EngineStats

__all__ = ["SwapSpace", "check_size"]

_logger = logging.getLogger("tightkv")

_PIECE_BYTES = 16 * 2**20
"""Bytes that are gathered before they are written, so that a long sequence needs no more."""


class SwapSpace:
    """Slots, each for the bytes of one block: in all layers of its group.

    Slots are counted as blocks are. One that a preempted sequence holds is in use; one that nobody
    holds may still have content with a name, and is the second tier of the prefix cache until
    somebody needs the slot: the one that was let go longest ago goes first.

    Attributes:
        costs: speeds of the copies, measured here, and of prefill, told by the engine.
    """

    def __init__(
        self, memory: SwapMemory, storage: KVCacheStorage, costs: SwapCosts, stats: EngineStats
    ) -> None:
        """Divide the memory into slots, and time a small copy.

        Raises:
            ConfigError: if it holds no slot, or cannot be used.
        """
        self.costs = costs
        self._memory = memory
        self._stats = stats
        self._tensors = list(storage.tensors())
        self._num_groups = len(storage.groups)
        self._block_size = storage.groups[0].specs[0].block_size
        self.slot_bytes = sum(blocks.shape[1] for blocks in self._tensors)
        self.num_slots = memory.num_bytes // self.slot_bytes
        check_size(memory.num_bytes, self.slot_bytes)
        self._slots = BlockPool(self.num_slots)
        self._piece = min(self.num_slots, max(1, _PIECE_BYTES // self.slot_bytes))
        self._rows = torch.zeros(
            self._piece, self.slot_bytes, dtype=torch.uint8, device=self._tensors[0].device
        )
        self._reasons: set[str] = set()
        self._time_a_copy()
        _logger.info(
            "Swap space: %.2f GiB in %s (%s slots of %s bytes; copies out %.2f GB/s, in %.2f GB/s)",
            memory.num_bytes / GIB,
            memory.place,
            f"{self.num_slots:,}",
            f"{self.slot_bytes:,}",
            (costs.copy_out.per_second or 0) / 1e9,
            (costs.copy_in.per_second or 0) / 1e9,
        )

    @property
    def num_used_slots(self) -> int:
        """Slots that preempted sequences hold."""
        return self.num_slots - self._slots.num_free_blocks

    @property
    def num_kept_slots(self) -> int:
        """Slots of the second tier."""
        return self._slots.num_cached_blocks

    def find(self, name: bytes) -> int | None:
        """The slot that holds this content of a block."""
        return self._slots.find(name)

    def store(self, blocks: Sequence[int], names: Sequence[bytes | None]) -> list[int] | None:
        """Copy blocks out and hold their slots.

        Args:
            blocks: their ids.
            names: of their contents, where they have one; what is here already is not copied.

        Returns:
            A slot for each block; None if there are too few, or the copy failed: nothing is held.
        """
        known = [None if name is None else self.find(name) for name in names]
        held = [slot for slot in known if slot is not None]
        self._slots.touch(held)
        missing = len(blocks) - len(held)
        if missing > self._slots.num_free_blocks:
            self._slots.free(held)
            return None
        new = self._slots.allocate(missing)
        fresh = [index for index, slot in enumerate(known) if slot is None]
        try:
            self._copy_out([blocks[index] for index in fresh], new)
        except SwapError as error:
            self._warn(error)
            self._slots.free(held + new)
            return None
        slots = [slot if slot is not None else -1 for slot in known]
        for index, slot in zip(fresh, new, strict=True):
            slots[index] = slot
            name = names[index]
            if name is not None:
                self._slots.remember(slot, name)
        return slots

    def keep(self, evicted: Sequence[tuple[int, bytes]]) -> None:
        """Take blocks that the prefix cache gives up into the second tier, as room allows."""
        if not self.prefers_swap(self._num_groups, self._num_groups, self._block_size):
            return
        # Ends of prompts are evicted before their beginnings, and are lost first here, too.
        taken = evicted[max(0, len(evicted) - self._slots.num_free_blocks) :][::-1]
        slots = self.store([block for block, _ in taken], [name for _, name in taken])
        if slots is not None:
            self.release(slots)

    def prefers_swap(self, blocks_out: int, blocks_in: int, num_tokens: int) -> bool:
        """Whether to move blocks instead of computing their tokens anew."""
        return self.costs.prefers_swap(
            blocks_out * self.slot_bytes, blocks_in * self.slot_bytes, num_tokens
        )

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots into blocks.

        Raises:
            SwapError: if that fails; the blocks' content is undefined then, that of the slots lost.
        """
        try:
            self._copy_in(slots, blocks)
        except SwapError as error:
            self._slots.forget(slots)
            self._warn(error)
            raise

    def count_fetched(self, num_tokens: int) -> None:
        """Note tokens that were found in the second tier, and need not be computed."""
        self._stats.num_fetched_tokens += num_tokens

    def hold(self, slots: Sequence[int]) -> None:
        """Use slots that were found; nobody else gets them."""
        self._slots.touch(slots)

    def release(self, slots: Sequence[int]) -> None:
        """Give up one use of each slot; content with a name stays while there is room."""
        self._slots.free(slots)

    def forget_all(self) -> None:
        """Empty the second tier; what sequences hold stays, without names."""
        self._slots.forget_all()

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError if the slots contradict themselves, or these lists of held ones."""
        self._slots.check_integrity()
        uses = [0] * self.num_slots
        for slot in (slot for slots in holders for slot in slots):
            uses[slot] += 1
        for slot, count in enumerate(uses):
            assert count == self._slots.ref_count(slot), f"slot {slot} leaks"

    def _copy_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        begin = time.perf_counter()
        for start in range(0, len(blocks), self._piece):
            piece = slice(start, start + self._piece)
            rows = self._rows[: len(blocks[piece])]
            _gather(self._tensors, blocks[piece], rows)
            for first, run in _runs(slots[piece]):
                self._memory.write(first, rows[run])
        self.costs.copy_out.note(len(blocks) * self.slot_bytes, time.perf_counter() - begin)
        self._stats.num_swapped_out_blocks += len(blocks)

    def _copy_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        begin = time.perf_counter()
        for start in range(0, len(blocks), self._piece):
            piece = slice(start, start + self._piece)
            rows = self._rows[: len(blocks[piece])]
            for first, run in _runs(slots[piece]):
                self._memory.read(first, rows[run])
            _scatter(rows, self._tensors, blocks[piece])
        self.costs.copy_in.note(len(blocks) * self.slot_bytes, time.perf_counter() - begin)
        self._stats.num_swapped_in_blocks += len(blocks)

    def _time_a_copy(self) -> None:
        """The speeds to begin with; real copies correct them."""
        for rate, copy in (
            (self.costs.copy_out, self._memory.write),
            (self.costs.copy_in, self._memory.read),
        ):
            begin = time.perf_counter()
            try:
                copy(0, self._rows)
            except SwapError as error:
                raise ConfigError(
                    f"swap_space cannot be used: {error}; choose another swap_dir, or set it to 0."
                ) from error
            rate.note(self._rows.numel(), time.perf_counter() - begin)

    def _warn(self, error: SwapError) -> None:
        """Say once for each reason that blocks are computed anew."""
        if str(error) not in self._reasons:
            self._reasons.add(str(error))
            _logger.warning("Swap space: %s; blocks are computed anew instead.", error)


def check_size(num_bytes: int, slot_bytes: int) -> None:
    """Refuse a swap space that could not hold a block, whose bytes may be known before the model.

    Raises:
        ConfigError: says how much a block needs.
    """
    if num_bytes < slot_bytes:
        raise ConfigError(
            f"swap_space is {num_bytes / GIB:g} GiB, less than a block's {slot_bytes} bytes: raise "
            "it, or set it to 0."
        )


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Slots that follow each other, as the first one and where they stand in the list."""
    start = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1:
            yield slots[start], slice(start, end)
            start = end


def _gather(layers: Sequence[torch.Tensor], blocks: Sequence[int], rows: torch.Tensor) -> None:
    """Copy blocks of all layers into rows, layer after layer."""
    for layer, columns in _columns(layers, rows):
        if rows.device.type == "cpu":
            # numpy copies a row at once: 4 GB/s where torch's index_select has 1.5.
            columns.numpy()[:] = layer.numpy()[numpy.asarray(blocks)]
        else:
            columns.copy_(layer[torch.tensor(blocks, device=rows.device)])


def _scatter(rows: torch.Tensor, layers: Sequence[torch.Tensor], blocks: Sequence[int]) -> None:
    """The way back of `_gather`."""
    for layer, columns in _columns(layers, rows):
        if rows.device.type == "cpu":
            layer.numpy()[numpy.asarray(blocks)] = columns.numpy()
        else:
            layer[torch.tensor(blocks, device=rows.device)] = columns


def _columns(
    layers: Sequence[torch.Tensor], rows: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's blocks, and its part of the rows."""
    offset = 0
    for layer in layers:
        yield layer, rows[:, offset : offset + layer.shape[1]]
        offset += layer.shape[1]
