"""Block tables whose blocks may be in the swap space."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tightkv.errors import SwapError
from tightkv.kvcache.block_hash import BlockHasher
from tightkv.kvcache.kv_cache_manager import KVCacheManager
from tightkv.kvcache.swap_space import SwapSpace

__all__ = ["SwappingKVCacheManager"]


class SwappingKVCacheManager(KVCacheManager):
    """Moves blocks of preempted sequences to a swap space and back.

    What the pools give up of the prefix cache goes there too, and `get_computed_blocks` finds it.

    Attributes:
        swap_space: where the blocks go.
    """

    def __init__(
        self,
        num_groups: int,
        num_blocks: int,
        block_size: int,
        seed: bytes,
        enable_prefix_caching: bool,
        swap_space: SwapSpace,
    ) -> None:
        """As `KVCacheManager`, with a swap space for the same groups."""
        super().__init__(num_groups, num_blocks, block_size, seed, enable_prefix_caching)
        self.swap_space = swap_space
        self._slot_tables: dict[str, list[list[int]]] = {}  # as block tables, of swapped sequences
        for group, pool in enumerate(self._pools):
            pool.on_evict = partial(swap_space.keep, group)

    @property
    def num_swapped(self) -> int:
        """Sequences whose blocks are in the swap space."""
        return len(self._slot_tables)

    def is_swapped(self, seq_id: str) -> bool:
        """Whether the swap space holds the sequence's blocks."""
        return seq_id in self._slot_tables

    def swap_out(
        self,
        seq_id: str,
        hasher: BlockHasher,
        token_ids: Sequence[int],
        num_computed_tokens: int,
    ) -> bool:
        """Move the blocks of a sequence's computed tokens to the swap space.

        Returns:
            Whether it holds slots instead of blocks now; False: nothing has changed.
        """
        count = self.blocks_for(num_computed_tokens)
        hashes = hasher.full_blocks(token_ids, num_computed_tokens)
        slot_tables: list[list[int]] = []
        for group, table in enumerate(self.block_tables(seq_id)):
            blocks = table[:count]
            slots = self.swap_space.store(group, blocks, self._names(group, blocks, hashes))
            if slots is None:
                self._release(slot_tables)
                return False
            slot_tables.append(slots)
        self.free(seq_id)
        self._slot_tables[seq_id] = slot_tables
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

        What the pools still hold of it is not copied; `num_reserved` free blocks must be left.

        Returns:
            False if there is no room: nothing has changed.

        Raises:
            SwapError: if the copy failed; the sequence holds nothing any more.
        """
        slot_tables = self._slot_tables.pop(seq_id)
        found = super().get_computed_blocks(seq_id, hasher, token_ids, num_computed_tokens)
        first = found // self.block_size
        if not self.allocate_slots(seq_id, len(token_ids), num_reserved=num_reserved):
            self.free(seq_id)
            self._slot_tables[seq_id] = slot_tables
            return False
        try:
            hashes = hasher.full_blocks(token_ids, num_computed_tokens)[first:]
            self._load(seq_id, hashes, first, [slots[first:] for slots in slot_tables])
        except SwapError:
            self.free(seq_id)
            raise
        finally:
            self._release(slot_tables)
        return True

    def get_computed_blocks(
        self, seq_id: str, hasher: BlockHasher, token_ids: Sequence[int], max_tokens: int
    ) -> int:
        """As without a swap space; then copy back what that has next, if all tokens have room."""
        found = super().get_computed_blocks(seq_id, hasher, token_ids, max_tokens)
        # The pools give up ends of prompts before beginnings: behind a gap they hold nothing.
        hashes = hasher.full_blocks(token_ids, max_tokens)[found // self.block_size :]
        slot_tables = self._find_slots(hashes)
        count = len(slot_tables[0])
        missing = self.blocks_for(len(token_ids) - found)
        if count == 0 or missing > self.num_free_blocks:
            return found
        if not self.swap_space.prefers_swap(0, count, count * self.block_size):
            return found
        return found + self.block_size * self._fetch(seq_id, hashes[:count], slot_tables)

    def free(self, seq_id: str) -> None:
        """Give back all blocks and slots of a sequence; one that holds none is left alone."""
        super().free(seq_id)
        self._release(self._slot_tables.pop(seq_id, []))

    def reset_prefix_cache(self) -> None:
        """Forget what blocks and slots hold now; sequences keep theirs."""
        super().reset_prefix_cache()
        self.swap_space.forget_all()

    def check_integrity(self) -> None:
        """Raise AssertionError if pools, slots and tables contradict each other."""
        super().check_integrity()
        assert not self._slot_tables.keys() & self._allocations.keys(), "blocks and slots at once"
        self.swap_space.check_integrity(
            [slots for tables in self._slot_tables.values() for slots in tables]
        )

    def _find_slots(self, hashes: Sequence[bytes]) -> list[list[int]]:
        """Slots of these contents, up to the first that a group has none of."""
        slot_tables: list[list[int]] = [[] for _ in self._pools]
        for block_hash in hashes:
            found = [self.swap_space.find(group, block_hash) for group in range(len(self._pools))]
            slots = [slot for slot in found if slot is not None]
            if len(slots) < len(found):
                break
            for table, slot in zip(slot_tables, slots, strict=True):
                table.append(slot)
        return slot_tables

    def _fetch(
        self, seq_id: str, hashes: Sequence[bytes], slot_tables: Sequence[Sequence[int]]
    ) -> int:
        """Give a sequence its next blocks, with these contents; how many it got: all or none."""
        first = self.num_blocks_of(seq_id)
        for slots in slot_tables:
            self.swap_space.hold(slots)
        try:
            # Blocks that are given up for it may need slots: these are held meanwhile.
            self.allocate_slots(seq_id, (first + len(hashes)) * self.block_size)
            self._load(seq_id, hashes, first, slot_tables)
        except SwapError:
            for pool, table in zip(self._pools, self.block_tables(seq_id), strict=True):
                pool.free(table[first:])
                del table[first:]
            return 0
        finally:
            self._release(slot_tables)
        self.swap_space.count_fetched(len(hashes) * self.block_size)
        return len(hashes)

    def _load(
        self,
        seq_id: str,
        hashes: Sequence[bytes],
        first: int,
        slot_tables: Sequence[Sequence[int]],
    ) -> None:
        """Fill a sequence's blocks from index `first` on, and offer those with a name to others.

        Args:
            seq_id: name of the sequence.
            hashes: of those of the blocks that are full.
            first: index in its block tables.
            slot_tables: where the contents are, per group.
        """
        for group, (pool, table) in enumerate(
            zip(self._pools, self.block_tables(seq_id), strict=True)
        ):
            slots = slot_tables[group]
            blocks = table[first : first + len(slots)]
            self.swap_space.load(group, slots, blocks)
            for slot, block, block_hash in zip(slots, blocks, hashes, strict=False):
                if self.swap_space.find(group, block_hash) == slot:
                    pool.remember(block, block_hash)
        self._allocations[seq_id].num_remembered = first + len(hashes)

    def _names(
        self, group: int, blocks: Sequence[int], hashes: Sequence[bytes]
    ) -> list[bytes | None]:
        """Hashes by which the pool knows these blocks of a sequence; None: it does not."""
        find = self._pools[group].find
        known = zip(blocks, hashes, strict=False)
        names = [block_hash if find(block_hash) == block else None for block, block_hash in known]
        return [*names, *[None] * (len(blocks) - len(names))]

    def _release(self, slot_tables: Sequence[Sequence[int]]) -> None:
        for slots in slot_tables:
            self.swap_space.release(slots)
