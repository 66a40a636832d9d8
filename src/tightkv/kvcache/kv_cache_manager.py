"""Block tables: which blocks hold the tokens of each sequence, in every layer group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tightkv.kvcache.block_hash import BlockHasher
from tightkv.kvcache.block_pool import BlockPool, Poison
from tightkv.kvcache.window import first_block, most_blocks, passing_position

__all__ = ["PASSED", "Allocation", "KVCacheManager", "name_of"]

PASSED = 0
"""In a block table in place of a block that has left the window; kernels do not look at it."""


@dataclass(slots=True)
class Allocation:
    """What one sequence holds.

    Attributes:
        block_tables: per layer group, the ids of its blocks in order.
        num_passed: per layer group, blocks at the beginning that it no longer holds.
        num_remembered: full blocks that others know of.
        num_slots: tokens that there is room for in all groups.
        next_passing: computed tokens from which on some group gives back a block.
    """

    block_tables: list[list[int]]
    hasher: BlockHasher
    num_passed: list[int]
    num_remembered: int
    num_slots: int = 0
    next_passing: int = 0

    def held(self, group: int) -> list[int]:
        """Blocks of a group that the sequence holds."""
        return self.block_tables[group][self.num_passed[group] :]

    def num_held(self, group: int) -> int:
        """How many these are."""
        return len(self.block_tables[group]) - self.num_passed[group]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The last sequence that found no room to start.

    Attributes:
        num_needed: free blocks that it would have taken, those it would have shared included.
        next_hash: of the first block that was not found; None: there was none left to look for.
    """

    seq_id: str
    num_needed: int
    next_hash: bytes | None


class KVCacheManager:
    """Gives blocks to sequences and takes them back.

    All groups take block ids from one pool. In the group that holds it, a block id stands for
    `block_size` tokens in all layers of the group. A group with a window holds only the blocks
    that queries to come still see.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        num_blocks: int,
        block_size: int,
        seed: bytes,
        enable_prefix_caching: bool = True,
        *,
        max_chunk: int,
        clear: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Start with all blocks free.

        Args:
            windows: of each layer group; None: full attention.
            num_blocks: block ids of the pool.
            block_size: tokens per block.
            seed: fingerprint of model, formats and scales.
            enable_prefix_caching: whether requests share blocks. Sequences of one request
                (`n` above 1) always do.
            max_chunk: tokens of a sequence that one step computes at most.
            clear: called with blocks that go from one group to another, if the other cannot read
                what they hold.
        """
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._windows = tuple(windows)
        self._max_chunk = max_chunk
        self._pool = BlockPool(num_blocks)
        self._seed = seed
        self._enable_prefix_caching = enable_prefix_caching
        self._clear = clear
        self._last_group: dict[int, int] = {}
        self._allocations: dict[str, Allocation] = {}
        self._refusal: _Refusal | None = None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that the pool could still give."""
        return self._pool.num_free_blocks

    @property
    def num_sequences(self) -> int:
        """Sequences that hold blocks."""
        return len(self._allocations)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens holds at most, in all groups."""
        return sum(self._blocks_of(window, num_tokens) for window in self._windows)

    def blocks_seen(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` computed tokens holds at least, in all groups."""
        size = self.block_size
        return sum(
            self._blocks_of(None, num_tokens) - first_block(window, num_tokens, size)
            for window in self._windows
        )

    def new_hasher(self, request: str, cache_salt: str = "") -> BlockHasher:
        """A hasher for one sequence; without prefix caching only its request shares blocks.

        Args:
            request: a name that no other request ever has.
            cache_salt: blocks are shared only with requests of the same one.
        """
        salt = f"salt {cache_salt}" if self._enable_prefix_caching else f"request {request}"
        return BlockHasher(self.block_size, self._seed, salt)

    def get_computed_blocks(
        self,
        seq_id: str,
        hasher: BlockHasher,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        num_reserved: int = 0,
    ) -> int:
        """Start a sequence with the blocks that hold its beginning already.

        Args:
            seq_id: name of the sequence, which holds nothing yet.
            hasher: the sequence's, from `new_hasher`.
            token_ids: its tokens.
            max_tokens: how many of them may be taken from the cache.
            num_reserved: free blocks that must be left, if any are filled for it.

        Returns:
            Number of tokens found, a multiple of the block size.
        """
        self._refusal = None  # blocks that this one shares were counted as free ones
        hashes = hasher.full_blocks(token_ids, max_tokens)
        length = self._longest_hit(hashes, self._is_found)
        tables, passed = [], []
        for group, window in enumerate(self._windows):
            first = first_block(window, length * self.block_size, self.block_size)
            found = [self._find(group, block_hash) for block_hash in hashes[first:length]]
            blocks = [block for block in found if block is not None]
            self._pool.touch(blocks)
            tables.append([PASSED] * first + blocks)
            passed.append(first)
        self._allocations[seq_id] = Allocation(tables, hasher, passed, length)
        return length * self.block_size

    def allocate_slots(
        self,
        seq_id: str,
        num_tokens: int,
        num_computed_tokens: int = 0,
        *,
        num_reserved: int = 0,
    ) -> bool:
        """Make room for the first `num_tokens` tokens of a sequence; False: no room, none taken.

        Blocks that queries from `num_computed_tokens` on do not see are given back first. A group
        with a window never gets more at once than the largest chunk needs. So asking for a whole
        prompt keeps room for it, chunk by chunk, as long as no chunk is larger than the one before.

        Args:
            seq_id: name of the sequence.
            num_tokens: how many there must be room for.
            num_computed_tokens: how many are in the cache, in all groups.
            num_reserved: free blocks that must be left, if any are taken.
        """
        allocation = self._allocations[seq_id]
        # Most steps need no block and give none back.
        if num_tokens <= allocation.num_slots and num_computed_tokens < allocation.next_passing:
            return True
        self._free_passed(allocation, num_computed_tokens)
        missing = self._missing(allocation, num_tokens)
        if any(missing):
            if sum(missing) + num_reserved > self.num_free_blocks:
                return False
            for group, count in enumerate(missing):
                allocation.block_tables[group] += self._allocate(group, count)
        allocation.num_slots = min(map(len, allocation.block_tables)) * self.block_size
        return True

    def refuse(self, seq_id: str, num_tokens: int) -> None:
        """Free a sequence that found no room for its first `num_tokens` tokens; note what it lacks.

        Looking up a long prompt takes milliseconds, and who waits asks in every step.
        """
        allocation = self._allocations[seq_id]
        groups = range(len(self._windows))
        held = [block for group in groups for block in allocation.held(group)]
        num_found_free = sum(self._pool.ref_count(block) == 1 for block in held)
        num_needed = sum(self._missing(allocation, num_tokens)) + num_found_free
        following = allocation.hasher.known[allocation.num_remembered :]
        self.free(seq_id)
        self._refusal = _Refusal(seq_id, num_needed, following[0] if following else None)

    def lacks_room(self, seq_id: str, num_reserved: int) -> bool:
        """Whether a sequence that was refused would be again, so that it need not be looked up.

        A longer beginning can be found only if the block is there that was the first to be missing,
        in all groups without a window: the others need but the end of a beginning.

        Args:
            seq_id: name of the sequence.
            num_reserved: free blocks that must be left.
        """
        refusal = self._refusal
        if refusal is None or refusal.seq_id != seq_id:
            return False
        if refusal.num_needed + num_reserved <= self.num_free_blocks:
            return False
        following = refusal.next_hash
        return following is None or not all(
            self._is_found(group, following)
            for group, window in enumerate(self._windows)
            if window is None
        )

    def remember_blocks(
        self, seq_id: str, token_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Offer the sequence's full, checked blocks to others."""
        allocation = self._allocations[seq_id]
        if num_computed_tokens // self.block_size <= allocation.num_remembered:
            return
        hashes = allocation.hasher.full_blocks(token_ids, num_computed_tokens)
        for group, table in enumerate(allocation.block_tables):
            begin = max(allocation.num_remembered, allocation.num_passed[group])
            for index in range(begin, len(hashes)):
                self._pool.remember(table[index], name_of(group, hashes[index]))
        allocation.num_remembered = len(hashes)

    def free(self, seq_id: str) -> None:
        """Give back all blocks of a sequence; one that holds none is left alone."""
        allocation = self._allocations.pop(seq_id, None)
        if allocation is not None:
            for group in range(len(self._windows)):
                self._pool.free(allocation.held(group))

    def num_blocks_of(self, seq_id: str) -> int:
        """Blocks that a sequence holds in all groups; 0 for one that waits."""
        allocation = self._allocations.get(seq_id)
        if allocation is None:
            return 0
        return sum(map(allocation.num_held, range(len(self._windows))))

    def num_shared_blocks_of(self, seq_id: str) -> int:
        """Blocks of a group that a sequence holds together with others, in the fullest group."""
        allocation = self._allocations[seq_id]
        return max(
            sum(self._pool.ref_count(block) > 1 for block in allocation.held(group))
            for group in range(len(self._windows))
        )

    def num_blocks_until(self, seq_id: str, num_tokens: int) -> int:
        """Blocks that a sequence will take besides those it holds, until it has so many tokens."""
        allocation = self._allocations[seq_id]
        return sum(
            max(0, most_blocks(window, num_tokens, self.block_size) - allocation.num_held(group))
            for group, window in enumerate(self._windows)
        )

    def num_used_blocks(self) -> tuple[int, ...]:
        """Per group the blocks that sequences use."""
        return tuple(
            len({block for held in self._allocations.values() for block in held.held(group)})
            for group in range(len(self._windows))
        )

    def block_letters(self) -> str:
        """A letter for each block: `BlockPool.letters`."""
        return self._pool.letters()

    def block_tables(self, seq_id: str) -> list[list[int]]:
        """Block ids of a sequence, per layer group; 0 for blocks that have left the window."""
        return self._allocations[seq_id].block_tables

    def reset_prefix_cache(self) -> None:
        """Forget what blocks hold now; running sequences go on to offer what they fill next."""
        self._pool.forget_all()

    def poison_with(self, poison: Poison) -> None:
        """Have blocks overwritten as their content is lost."""
        self._pool.poison = poison

    def check_integrity(self) -> None:
        """Raise AssertionError if pool and block tables contradict each other."""
        self._pool.check_integrity()
        users = [0] * self.num_blocks
        for allocation in self._allocations.values():
            for group, table in enumerate(allocation.block_tables):
                passed = table[: allocation.num_passed[group]]
                assert passed == [PASSED] * allocation.num_passed[group], "a passed block is held"
                for block in allocation.held(group):
                    users[block] += 1
        for block, count in enumerate(users):
            assert count == self._pool.ref_count(block), f"block {block} leaks"
        self._check_contents()

    def _check_contents(self) -> None:
        """Who uses a block that others use or may find has the tokens that it is named by."""
        names: dict[int, bytes] = {}
        for seq_id, allocation in self._allocations.items():
            hashes = allocation.hasher.known
            for group, passed in enumerate(allocation.num_passed):
                for index, block in enumerate(allocation.held(group), passed):
                    name = self._pool.hash_of(block) or names.get(block)
                    own = name_of(group, hashes[index]) if index < len(hashes) else None
                    about = f"block {block} of group {group}, number {index} of {seq_id},"
                    assert name is None or name == own, f"{about} holds other tokens"
                    is_alone = self._pool.ref_count(block) == 1
                    assert own or is_alone, f"{about} is shared, but not full"
                    if own:
                        names[block] = own

    def _missing(self, allocation: Allocation, num_tokens: int) -> list[int]:
        """Per group the blocks that a sequence must get to have room for `num_tokens` tokens."""
        missing = []
        blocks = self._blocks_of(None, num_tokens)
        for window, table, passed in zip(
            self._windows, allocation.block_tables, allocation.num_passed, strict=True
        ):
            most = min(blocks, passed + self._blocks_of(window, num_tokens))
            missing.append(max(0, most - len(table)))
        return missing

    def _blocks_of(self, window: int | None, num_tokens: int) -> int:
        return most_blocks(window, num_tokens, self.block_size, self._max_chunk)

    def _find(self, group: int, block_hash: bytes) -> int | None:
        return self._pool.find(name_of(group, block_hash))

    def _is_found(self, group: int, block_hash: bytes) -> bool:
        return self._find(group, block_hash) is not None

    def _longest_hit(self, hashes: Sequence[bytes], has: Callable[[int, bytes], bool]) -> int:
        """Blocks of the longest beginning behind which every group could go on."""
        length, longest = len(hashes), -1
        while length != longest:
            longest = length
            for group in range(len(self._windows)):
                length = self._longest_hit_of(group, hashes, length, has)
        return length

    def _longest_hit_of(
        self, group: int, hashes: Sequence[bytes], length: int, has: Callable[[int, bytes], bool]
    ) -> int:
        """The same for one group, `length` at most: it needs the blocks its next query sees."""
        window = self._windows[group]
        index = length - 1
        while index >= first_block(window, length * self.block_size, self.block_size):
            if not has(group, hashes[index]):
                length = index
            index -= 1
        return length

    def _free_passed(self, allocation: Allocation, num_computed_tokens: int) -> None:
        """Give back the blocks that have left the windows, and note when the next ones do."""
        allocation.next_passing = sys.maxsize
        for group, window in enumerate(self._windows):
            first = first_block(window, num_computed_tokens, self.block_size)
            passed, table = allocation.num_passed[group], allocation.block_tables[group]
            if first > passed:
                self._pool.free(table[passed:first])
                table[passed:first] = [PASSED] * (first - passed)
                allocation.num_passed[group] = first
            if window is not None:
                passing = passing_position(window, first, self.block_size)
                allocation.next_passing = min(allocation.next_passing, passing)

    def _allocate(self, group: int, count: int) -> list[int]:
        blocks = self._pool.allocate(count)
        if self._clear is not None:
            strange = [block for block in blocks if self._last_group.get(block, group) != group]
            if strange:
                self._clear(strange)
            self._last_group.update(dict.fromkeys(blocks, group))
        return blocks


def name_of(group: int, block_hash: bytes) -> bytes:
    """Name of a block's content: the groups hold different layers of the same tokens."""
    return block_hash + group.to_bytes(1)
