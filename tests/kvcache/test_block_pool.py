"""Random histories of the pool and of the manager, against plain models of both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from tightkv.kvcache import KVCacheManager
from tightkv.kvcache.block_hash import BlockHasher
from tightkv.kvcache.block_pool import BlockPool

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """BlockPool against lists: uses of each block, free blocks by age, names of contents."""

    uses = Bundle("uses")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.ref_counts = [0] * NUM_BLOCKS
        self.free_blocks = list(range(NUM_BLOCKS))
        self.names: dict[bytes, int] = {}

    @rule(target=uses, count=st.integers(0, 3))
    def allocate(self, count: int) -> list[int]:
        if count > len(self.free_blocks):
            with pytest.raises(ValueError, match="were asked for"):
                self.pool.allocate(count)
            return []
        expected, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        blocks = self.pool.allocate(count)
        assert blocks == expected
        self.names = {name: block for name, block in self.names.items() if block not in blocks}
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    @rule(blocks=consumes(uses))
    def free(self, blocks: list[int]) -> None:
        self.pool.free(blocks)
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_blocks.append(block)

    @rule(target=uses, names=st.lists(st.integers(0, 9), max_size=3, unique=True))
    def share(self, names: list[int]) -> list[int]:
        found = [self.pool.find(bytes([name])) for name in names]
        assert found == [self.names.get(bytes([name])) for name in names]
        blocks = [block for block in found if block is not None]
        self.pool.touch(blocks)
        for block in blocks:
            self.ref_counts[block] += 1
            if block in self.free_blocks:
                self.free_blocks.remove(block)
        return blocks

    @rule(target=uses, blocks=consumes(uses), name=st.integers(0, 9))
    def remember(self, blocks: list[int], name: int) -> list[int]:
        for block in blocks[:1]:
            self.pool.remember(block, bytes([name]))
            if bytes([name]) not in self.names and block not in self.names.values():
                self.names[bytes([name])] = block
        return blocks

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.names.clear()

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def free_unused(self, block: int) -> None:
        if self.ref_counts[block] == 0:
            with pytest.raises(ValueError, match="nobody uses it"):
                self.pool.free([block])

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free_blocks == len(self.free_blocks)
        assert [self.pool.ref_count(block) for block in range(NUM_BLOCKS)] == self.ref_counts
        for name in range(10):
            assert self.pool.find(bytes([name])) == self.names.get(bytes([name]))


BLOCK_SIZE = 4
NUM_GROUPS = 2


class Running:
    """A sequence of the model: its tokens, and how many of them are in the cache."""

    def __init__(self, name: str, request: str, hasher: BlockHasher, tokens: list[int]) -> None:
        self.name = name
        self.request = request
        self.hasher = hasher
        self.tokens = tokens
        self.num_computed = 0


class ManagerMachine(RuleBasedStateMachine):
    """KVCacheManager with a cache that notes, in every slot, which token was computed after what.

    K and V of a token depend on all tokens before it. So a slot holds the whole beginning, and a
    block found by prefix must hold exactly that of the sequence that found it.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, Running] = {}
        self.slots: list[dict[tuple[int, int], tuple[str, tuple[int, ...]]]] = []
        self.prefix_caching = True
        self.num_started = 0

    @initialize(prefix_caching=st.booleans())
    def start_manager(self, prefix_caching: bool) -> None:
        self.prefix_caching = prefix_caching
        self.slots = [{} for _ in range(NUM_GROUPS)]
        self.manager = KVCacheManager(NUM_GROUPS, 8, BLOCK_SIZE, b"seed", prefix_caching)

    @rule(
        target=sequences,
        request=st.sampled_from("abc"),
        # Two tokens only, so that beginnings are often equal.
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18),
    )
    def start(self, request: str, tokens: list[int]) -> str:
        self.num_started += 1
        name = f"{request}-{self.num_started}"
        self.admit(Running(name, request, self.manager.new_hasher(request), list(tokens)))
        return name

    def admit(self, sequence: Running) -> None:
        limit = len(sequence.tokens) - 1
        found = self.manager.get_computed_blocks(
            sequence.name, sequence.hasher, sequence.tokens, limit
        )
        assert found % BLOCK_SIZE == 0
        assert found <= limit
        sequence.num_computed = found
        self.running[sequence.name] = sequence
        for position in range(found):
            self.check_slot(sequence, position)
        if not self.prefix_caching:
            for slots, table in zip(
                self.slots, self.manager.block_tables(sequence.name), strict=True
            ):
                for block in table:
                    assert slots[block, 0][0] == sequence.request

    def check_slot(self, sequence: Running, position: int) -> None:
        for slots, table in zip(self.slots, self.manager.block_tables(sequence.name), strict=True):
            slot = (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
            assert slots[slot][1] == tuple(sequence.tokens[: position + 1])

    @rule(name=sequences, count=st.integers(1, 10))
    def compute(self, name: str, count: int) -> None:
        """What a step does: allocate, then write K and V of the next tokens."""
        sequence = self.running.get(name)
        if sequence is None:
            return
        end = min(sequence.num_computed + count, len(sequence.tokens))
        before = [list(table) for table in self.manager.block_tables(name)]
        free = self.manager.num_free_blocks
        missing = max(0, self.manager.blocks_for(end) - len(before[0]))
        assert self.manager.allocate_slots(name, end) == (missing <= free)
        tables = self.manager.block_tables(name)
        if missing > free:
            assert tables == before
            assert self.manager.num_free_blocks == free
            return
        assert self.manager.num_free_blocks == free - missing
        assert [table[: len(old)] for table, old in zip(tables, before, strict=True)] == before
        for position in range(sequence.num_computed, end):
            for slots, table in zip(self.slots, tables, strict=True):
                slot = (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                slots[slot] = (sequence.request, tuple(sequence.tokens[: position + 1]))
        sequence.num_computed = end

    @rule(name=sequences, token=st.integers(0, 1))
    def append(self, name: str, token: int) -> None:
        sequence = self.running.get(name)
        if sequence is not None and len(sequence.tokens) < 30:
            sequence.tokens.append(token)

    @rule(name=sequences)
    def remember(self, name: str) -> None:
        sequence = self.running.get(name)
        if sequence is not None:
            self.manager.remember_blocks(
                name, sequence.hasher, sequence.tokens, sequence.num_computed
            )

    @rule(target=sequences, name=consumes(sequences), again=st.booleans())
    def free(self, name: str, again: bool) -> object:
        """Finished, or preempted: then it starts anew with its own hasher."""
        sequence = self.running.pop(name, None)
        self.manager.free(name)
        if sequence is None or not again:
            return multiple()
        self.admit(sequence)
        return name

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        hasher = self.manager.new_hasher("a")
        assert self.manager.get_computed_blocks("probe", hasher, [0] * 20, 20) == 0
        self.manager.free("probe")

    @precondition(lambda self: self.slots)
    @invariant()
    def agrees(self) -> None:
        self.manager.check_integrity()
        assert self.manager.num_sequences == len(self.running)
        for sequence in self.running.values():
            for position in range(sequence.num_computed):
                self.check_slot(sequence, position)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
ManagerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

TestPool = PoolMachine.TestCase
TestManager = ManagerMachine.TestCase


# ---- what the machines leave to chance ----


def test_oldest_free_block_is_reused_first() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.free(second)
    pool.free(first)
    # The end of what was freed first, then its beginning, which others are likelier to share.
    assert pool.allocate(5) == [*reversed(second), *reversed(first)]


def test_a_block_in_use_keeps_its_content() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.remember(block, b"x")
    pool.touch([block])
    pool.free([block])
    assert pool.ref_count(block) == 1
    assert pool.allocate(1) != [block]
    assert pool.find(b"x") == block


def test_a_free_block_keeps_its_content_until_it_is_reused() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.remember(block, b"x")
    pool.free([block])
    assert pool.find(b"x") == block
    pool.allocate(2)
    assert pool.find(b"x") is None


def test_second_block_with_the_same_content_stays_unknown() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.remember(first, b"x")
    pool.remember(second, b"x")
    pool.remember(first, b"y")
    assert pool.find(b"x") == first
    assert pool.find(b"y") is None


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: pool._ref_counts.__setitem__(0, 1),
        lambda pool: pool._free.popitem(),
        lambda pool: pool._block_of_hash.__setitem__(b"z", 3),
        lambda pool: pool._hash_of_block.__setitem__(3, b"z"),
    ],
)
def test_check_integrity_notices(break_it: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(4)
    pool.check_integrity()
    break_it(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()
