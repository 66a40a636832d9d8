"""Block tables: which blocks hold the tokens of each sequence, in every layer group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tightkv.kvcache.block_hash import BlockHasher
from tightkv.kvcache.block_pool import BlockPool

__all__ = ["KVCacheManager"]


@dataclass(slots=True)
class _Allocation:
    """What one sequence holds. `block_tables` has one list per layer group."""

    block_tables: list[list[int]]
    hasher: BlockHasher
    num_remembered: int = field(default=0)


class KVCacheManager:
    """Gives blocks to sequences and takes them back.

    Every group has a pool of its own with the same number of blocks: a block id stands for
    `block_size` tokens in all layers of that group.
    """

    def __init__(
        self,
        num_groups: int,
        num_blocks: int,
        block_size: int,
        seed: bytes,
        enable_prefix_caching: bool = True,
    ) -> None:
        """Start with all blocks free.

        Args:
            num_groups: layer groups.
            num_blocks: blocks of each group.
            block_size: tokens per block.
            seed: fingerprint of model, formats and scales.
            enable_prefix_caching: whether requests share blocks. Sequences of one request
                (`n` above 1) always do.
        """
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._pools = [BlockPool(num_blocks) for _ in range(num_groups)]
        self._seed = seed
        self._enable_prefix_caching = enable_prefix_caching
        self._allocations: dict[str, _Allocation] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that every group could still give."""
        return min(pool.num_free_blocks for pool in self._pools)

    @property
    def num_sequences(self) -> int:
        """Sequences that hold blocks."""
        return len(self._allocations)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def new_hasher(self, request: str, cache_salt: str = "") -> BlockHasher:
        """A hasher for one sequence; without prefix caching only its request shares blocks.

        Args:
            request: a name that no other request ever has.
            cache_salt: blocks are shared only with requests of the same one.
        """
        salt = f"salt {cache_salt}" if self._enable_prefix_caching else f"request {request}"
        return BlockHasher(self.block_size, self._seed, salt)

    def get_computed_blocks(
        self, seq_id: str, hasher: BlockHasher, token_ids: Sequence[int], max_tokens: int
    ) -> int:
        """Start a sequence with the blocks that hold its beginning already.

        Args:
            seq_id: name of the sequence, which holds nothing yet.
            hasher: the sequence's, from `new_hasher`.
            token_ids: its tokens.
            max_tokens: how many of them may be taken from the cache.

        Returns:
            Number of tokens found, a multiple of the block size.
        """
        found: list[tuple[int, ...]] = []
        for block_hash in hasher.full_blocks(token_ids, max_tokens):
            blocks = [pool.find(block_hash) for pool in self._pools]
            if any(block is None for block in blocks):
                break
            found.append(tuple(block for block in blocks if block is not None))
        tables = [[blocks[group] for blocks in found] for group in range(len(self._pools))]
        for pool, table in zip(self._pools, tables, strict=True):
            pool.touch(table)
        self._allocations[seq_id] = _Allocation(tables, hasher, len(found))
        return len(found) * self.block_size

    def allocate_slots(self, seq_id: str, num_tokens: int, *, num_reserved: int = 0) -> bool:
        """Make room for the first `num_tokens` tokens of a sequence; False: no room, no change.

        `num_reserved` free blocks must be left.
        """
        tables = self._allocations[seq_id].block_tables
        missing = self.blocks_for(num_tokens) - len(tables[0])
        # Most steps need no block: they ask nobody.
        if missing <= 0:
            return True
        if missing + num_reserved > self.num_free_blocks:
            return False
        for pool, table in zip(self._pools, tables, strict=True):
            table.extend(pool.allocate(missing))
        return True

    def remember_blocks(
        self,
        seq_id: str,
        hasher: BlockHasher,
        token_ids: Sequence[int],
        num_computed_tokens: int,
    ) -> None:
        """Offer the sequence's full, checked blocks to others."""
        allocation = self._allocations[seq_id]
        hashes = hasher.full_blocks(token_ids, num_computed_tokens)
        for index in range(allocation.num_remembered, len(hashes)):
            for pool, table in zip(self._pools, allocation.block_tables, strict=True):
                pool.remember(table[index], hashes[index])
        allocation.num_remembered = max(allocation.num_remembered, len(hashes))

    def free(self, seq_id: str) -> None:
        """Give back all blocks of a sequence; one that holds none is left alone."""
        allocation = self._allocations.pop(seq_id, None)
        if allocation is not None:
            for pool, table in zip(self._pools, allocation.block_tables, strict=True):
                pool.free(table)

    def num_blocks_of(self, seq_id: str) -> int:
        """Blocks of each group that a sequence holds; 0 for one that waits."""
        allocation = self._allocations.get(seq_id)
        return len(allocation.block_tables[0]) if allocation else 0

    def num_shared_blocks_of(self, seq_id: str) -> int:
        """Blocks of a group that a sequence holds together with others."""
        pool, table = self._pools[0], self._allocations[seq_id].block_tables[0]
        return sum(pool.ref_count(block) > 1 for block in table)

    def block_letters(self) -> tuple[str, ...]:
        """Per group a letter for each block: `BlockPool.letters`."""
        return tuple(pool.letters() for pool in self._pools)

    def block_tables(self, seq_id: str) -> list[list[int]]:
        """Block ids of a sequence, per layer group."""
        return self._allocations[seq_id].block_tables

    def reset_prefix_cache(self) -> None:
        """Forget what blocks hold now; running sequences go on to offer what they fill next."""
        for pool in self._pools:
            pool.forget_all()

    def poison_with(self, poison: Callable[[int, Sequence[int], bool], None]) -> None:
        """Have `poison(group, blocks, are_used)` overwrite blocks as their content is lost."""
        for group, pool in enumerate(self._pools):
            pool.poison = partial(poison, group)

    def check_integrity(self) -> None:
        """Raise AssertionError if pools and block tables contradict each other."""
        for group, pool in enumerate(self._pools):
            pool.check_integrity()
            users = [0] * pool.num_blocks
            for allocation in self._allocations.values():
                for block in allocation.block_tables[group]:
                    users[block] += 1
            for block, count in enumerate(users):
                assert count == pool.ref_count(block), f"block {block} of group {group} leaks"
            self._check_contents(group, pool)

    def _check_contents(self, group: int, pool: BlockPool) -> None:
        """Who uses a block that others use or may find has the tokens that it is named by."""
        names: dict[int, bytes] = {}
        for seq_id, allocation in self._allocations.items():
            hashes = allocation.hasher.known
            for index, block in enumerate(allocation.block_tables[group]):
                name = pool.hash_of(block) or names.get(block)
                own = hashes[index] if index < len(hashes) else None
                about = f"block {block} of group {group}, number {index} of {seq_id},"
                assert name is None or name == own, f"{about} holds other tokens"
                assert own or pool.ref_count(block) == 1, f"{about} is shared, but not full"
                if own:
                    names[block] = own
