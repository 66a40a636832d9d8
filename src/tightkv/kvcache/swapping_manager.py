"""Block tables whose blocks may be in the swap space."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tightkv.errors import SwapError
from tightkv.kvcache.block_hash import BlockHasher
from tightkv.kvcache.kv_cache_manager import PASSED, Allocation, KVCacheManager, name_of
from tightkv.kvcache.swap_space import SwapSpace
from tightkv.kvcache.window import first_block

__all__ = ["SwappingKVCacheManager"]


class SwappingKVCacheManager(KVCacheManager):
    """Moves blocks of preempted sequences to a swap space and back.

    What the pools give up of the prefix cache goes there too, and `get_computed_blocks` finds it.

    Attributes:
        swap_space: where the blocks go.
    """

    def __init__(self, *, swap_space: SwapSpace, **arguments: Any) -> None:
        """As `KVCacheManager`, with a swap space."""
        super().__init__(**arguments)
        self.swap_space = swap_space
        # Per layer group, the slots of the blocks that a sequence held.
        self._swapped: dict[str, list[list[int]]] = {}
        if self._enable_prefix_caching:
            self._pool.on_evict = swap_space.keep

    @property
    def num_swapped(self) -> int:
        """Sequences whose blocks are in the swap space."""
        return len(self._swapped)

    def is_swapped(self, seq_id: str) -> bool:
        """Whether the swap space holds the sequence's blocks."""
        return seq_id in self._swapped

    def swap_out(self, seq_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> bool:
        """Move the blocks of a sequence's computed tokens to the swap space.

        Returns:
            Whether it holds slots instead of blocks now; False: it has its blocks.
        """
        allocation = self._allocations[seq_id]
        self._free_passed(allocation, num_computed_tokens)
        hashes = allocation.hasher.full_blocks(token_ids, num_computed_tokens)
        end = -(-num_computed_tokens // self.block_size)
        blocks: list[int] = []
        names: list[bytes | None] = []
        for group, first in enumerate(allocation.num_passed):
            of_group = allocation.block_tables[group][first:end]
            blocks += of_group
            names += self._names(group, of_group, hashes[first:])
        slots = self.swap_space.store(blocks, names)
        if slots is None:
            return False
        rest = iter(slots)
        self._swapped[seq_id] = [
            list(itertools.islice(rest, end - first)) for first in allocation.num_passed
        ]
        super().free(seq_id)
        return True

    def swap_in(
        self,
        seq_id: str,
        hasher: BlockHasher,
        token_ids: Sequence[int],
        num_computed_tokens: int,
        *,
        num_reserved: int = 0,
    ) -> bool:
        """Bring a sequence's blocks back, with room for all of its tokens.

        What the pool still holds of it is not copied; `num_reserved` free blocks must be left.

        Returns:
            False if there is no room: nothing has changed.

        Raises:
            SwapError: if the copy failed; the sequence holds nothing any more.
        """
        swapped = self._swapped.pop(seq_id)
        found = super().get_computed_blocks(seq_id, hasher, token_ids, num_computed_tokens)
        if not self.allocate_slots(
            seq_id, len(token_ids), num_computed_tokens, num_reserved=num_reserved
        ):
            self.refuse(seq_id, len(token_ids))
            self._swapped[seq_id] = swapped
            return False
        hashes = hasher.full_blocks(token_ids, num_computed_tokens)
        try:
            for group, first in enumerate(self._allocations[seq_id].num_passed):
                begin = max(first, found // self.block_size)
                slots = swapped[group][begin - first :]
                self._load(seq_id, group, begin, slots, hashes)
        except SwapError:
            self.free(seq_id)
            raise
        finally:
            self._release(swapped)
        self._allocations[seq_id].num_remembered = len(hashes)
        return True

    def get_computed_blocks(
        self,
        seq_id: str,
        hasher: BlockHasher,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        num_reserved: int = 0,
    ) -> int:
        """As without a swap space; then copy back what that has next, if all tokens have room."""
        found = super().get_computed_blocks(seq_id, hasher, token_ids, max_tokens)
        hashes = hasher.full_blocks(token_ids, max_tokens)
        length = self._longest_hit(hashes, self._is_kept)
        num_tokens = length * self.block_size
        needed = self.blocks_for(len(token_ids)) + num_reserved
        if num_tokens <= found or not self._fetch(seq_id, hasher, hashes[:length], found, needed):
            return found
        self.swap_space.count_fetched(num_tokens - found)
        return num_tokens

    def free(self, seq_id: str) -> None:
        """Give back all blocks and slots of a sequence; one that holds none is left alone."""
        super().free(seq_id)
        swapped = self._swapped.pop(seq_id, None)
        if swapped is not None:
            self._release(swapped)

    def reset_prefix_cache(self) -> None:
        """Forget what blocks and slots hold now; sequences keep theirs."""
        super().reset_prefix_cache()
        self.swap_space.forget_all()

    def check_integrity(self) -> None:
        """Raise AssertionError if pools, slots and tables contradict each other."""
        super().check_integrity()
        assert not self._swapped.keys() & self._allocations.keys(), "blocks and slots at once"
        self.swap_space.check_integrity(
            [slots for swapped in self._swapped.values() for slots in swapped]
        )

    def _is_kept(self, group: int, block_hash: bytes) -> bool:
        """Whether a block's content is in the pool or in the swap space."""
        name = name_of(group, block_hash)
        return self._pool.find(name) is not None or self.swap_space.find(name) is not None

    def _fetch(
        self,
        seq_id: str,
        hasher: BlockHasher,
        hashes: Sequence[bytes],
        num_found: int,
        num_needed: int,
    ) -> bool:
        """Let a sequence start with these blocks, some of which the swap space has.

        Args:
            seq_id: name of the sequence, which holds blocks of `num_found` tokens.
            hasher: the sequence's.
            hashes: of its first blocks.
            num_found: tokens that it need not get.
            num_needed: blocks that there must be, its own included.

        Returns:
            Whether it holds them; False: it holds what it held.
        """
        length = len(hashes) * self.block_size
        firsts = [first_block(window, length, self.block_size) for window in self._windows]
        names = [
            [name_of(group, h) for h in hashes[firsts[group] :]] for group in range(len(firsts))
        ]
        blocks = {name: self._pool.find(name) for each in names for name in each}
        held = [block for block in blocks.values() if block is not None]
        kept = {name: self.swap_space.find(name) for name in blocks if blocks[name] is None}
        slots = [slot for slot in kept.values() if slot is not None]
        num_free = self.num_free_blocks - sum(self._pool.ref_count(block) == 0 for block in held)
        has_room = num_needed - len(held) <= num_free
        if not has_room or not self.swap_space.prefers_swap(0, len(slots), length - num_found):
            return False
        self._pool.touch(held)
        self.swap_space.hold(slots)
        new: list[int] = []
        try:
            for group, each in enumerate(names):
                new += self._allocate(group, sum(blocks[name] is None for name in each))
            self.swap_space.load(slots, new)
        except SwapError:
            self._pool.free(held + new)
            return False
        finally:
            self.swap_space.release(slots)
        for name, fresh in zip(kept, new, strict=True):
            blocks[name] = fresh
            self._pool.remember(fresh, name)
        self.free(seq_id)
        tables = [
            [PASSED] * first + [block for name in each if (block := blocks[name]) is not None]
            for first, each in zip(firsts, names, strict=True)
        ]
        self._allocations[seq_id] = Allocation(tables, hasher, firsts, len(hashes))
        return True

    def _load(
        self, seq_id: str, group: int, begin: int, slots: Sequence[int], hashes: Sequence[bytes]
    ) -> None:
        """Fill a sequence's blocks of a group from index `begin` on; others may use named ones."""
        blocks = self.block_tables(seq_id)[group][begin : begin + len(slots)]
        self.swap_space.load(slots, blocks)
        for slot, block, block_hash in zip(slots, blocks, hashes[begin:], strict=False):
            name = name_of(group, block_hash)
            if self.swap_space.find(name) == slot:
                self._pool.remember(block, name)

    def _names(
        self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]
    ) -> list[bytes | None]:
        """Names by which the pool knows these blocks of a sequence; None: it does not."""
        names = [name_of(group, block_hash) for block_hash in hashes]
        known = zip(blocks, names, strict=False)
        found = [name if self._pool.find(name) == block else None for block, name in known]
        return [*found, *[None] * (len(blocks) - len(found))]

    def _release(self, slot_tables: Sequence[Sequence[int]]) -> None:
        for slots in slot_tables:
            self.swap_space.release(slots)
