"""Random histories of the pool and of the manager, against plain models of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tightkv.kvcache import KVCacheManager
from tightkv.kvcache.block_hash import BlockHasher
from tightkv.kvcache.block_pool import BlockPool

NUM_BLOCKS = 6
NAMES = [bytes([name]) for name in range(8)]


class PoolMachine(RuleBasedStateMachine):
    """BlockPool against lists: uses of each block, free blocks in order, names of contents."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []  # what somebody will free some day
        self.free_blocks = list(range(NUM_BLOCKS))
        self.names: dict[bytes, int] = {}

    def ref_counts(self) -> list[int]:
        used = [block for blocks in self.held for block in blocks]
        return [used.count(block) for block in range(NUM_BLOCKS)]

    @rule(count=st.integers(1, 3), names=st.permutations(NAMES), remember=st.booleans())
    def allocate(self, count: int, names: list[bytes], remember: bool) -> None:
        if count > len(self.free_blocks):
            with pytest.raises(ValueError, match="were asked for"):
                self.pool.allocate(count)
            return
        expected, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        blocks = self.pool.allocate(count)
        assert blocks == expected
        self.held.append(blocks)
        self.names = {name: block for name, block in self.names.items() if block not in blocks}
        if remember:
            for block, name in zip(blocks, names, strict=False):
                self.remember(block, name)

    def remember(self, block: int, name: bytes) -> None:
        self.pool.remember(block, name)
        if name not in self.names and block not in self.names.values():
            self.names[name] = block

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def remember_one(self, data: st.DataObject, name: bytes) -> None:
        self.remember(data.draw(st.sampled_from(data.draw(st.sampled_from(self.held)))), name)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free(blocks)
        counts = self.ref_counts()
        for block in reversed(blocks):
            if counts[block] == 0:
                has_name = block in self.names.values()
                self.free_blocks.insert(len(self.free_blocks) if has_name else 0, block)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        wanted = st.sampled_from(sorted(self.names))
        names = data.draw(st.lists(wanted, min_size=1, max_size=3, unique=True))
        blocks = [block for block in map(self.pool.find, names) if block is not None]
        assert blocks == [self.names[name] for name in names]
        self.pool.touch(blocks)
        self.held.append(blocks)
        self.free_blocks = [block for block in self.free_blocks if block not in blocks]

    @precondition(lambda self: len(self.names) > 4)
    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.names.clear()

    @precondition(lambda self: self.free_blocks)
    @rule(data=st.data())
    def free_unused(self, data: st.DataObject) -> None:
        with pytest.raises(ValueError, match="nobody uses it"):
            self.pool.free([data.draw(st.sampled_from(self.free_blocks))])

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free_blocks == len(self.free_blocks)
        counts = [self.pool.ref_count(block) for block in range(NUM_BLOCKS)]
        assert counts == self.ref_counts()
        for name in NAMES:
            assert self.pool.find(name) == self.names.get(name)


BLOCK_SIZE = 4
WINDOWS = (None, 6, 1)
NUM_SHARED = 20
MAX_CHUNK = 10
# Few prompts, cut anywhere, so that beginnings are often equal and blocks repeat.
PROMPTS = ([0] * 30, [1] * 30, [0] * 8 + [1] * 22)


@dataclass
class Running:
    """A sequence of the model: its tokens, and how many of them are in the cache."""

    name: str
    request: str
    hasher: BlockHasher
    tokens: list[int]
    num_computed: int = 0


def first_seen(window: int | None, position: int) -> int:
    """First position that queries from `position` on see."""
    return 0 if window is None else max(0, position - window + 1)


class ManagerMachine(RuleBasedStateMachine):
    """KVCacheManager with a cache that notes, in every slot, which token was computed after what.

    K and V of a token depend on all tokens before it. So a slot holds the whole beginning, and a
    block found by prefix must hold exactly that of the sequence that found it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Running] = []
        self.slots: dict[tuple[int, int], tuple[int, str, tuple[int, ...]]] = {}
        self.prefix_caching = True
        self.num_started = 0
        self.manager = self.make_manager()

    def make_manager(self) -> KVCacheManager:
        return KVCacheManager(
            WINDOWS, NUM_SHARED, BLOCK_SIZE, b"seed", self.prefix_caching, max_chunk=MAX_CHUNK
        )

    @initialize(prefix_caching=st.booleans())
    def choose(self, prefix_caching: bool) -> None:
        self.prefix_caching = prefix_caching
        self.manager = self.make_manager()

    def pick(self, data: st.DataObject) -> Running:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    @precondition(lambda self: len(self.running) < 4)
    @rule(
        request=st.sampled_from("ab"),
        prompt=st.sampled_from(PROMPTS),
        cut=st.integers(1, 28),
        count=st.integers(0, MAX_CHUNK),
        remember=st.booleans(),
    )
    def start(self, request: str, prompt: list[int], cut: int, count: int, remember: bool) -> None:
        self.num_started += 1
        hasher = self.manager.new_hasher(request)
        sequence = Running(f"{request}-{self.num_started}", request, hasher, prompt[:cut])
        self.admit(sequence)
        if not self.manager.allocate_slots(sequence.name, cut, sequence.num_computed):
            self.finish_one(sequence)
            return
        assert self.compute(sequence, count)  # room was kept for all chunks
        if remember:
            self.remember(sequence)

    def admit(self, sequence: Running) -> None:
        limit = len(sequence.tokens) - 1
        found = self.manager.get_computed_blocks(
            sequence.name, sequence.hasher, sequence.tokens, limit
        )
        assert found % BLOCK_SIZE == 0
        assert found <= limit
        sequence.num_computed = found
        self.running.append(sequence)
        self.check_slots(sequence)
        if not self.prefix_caching:
            tables = self.manager.block_tables(sequence.name)
            for window, table in zip(WINDOWS, tables, strict=True):
                seen = table[first_seen(window, found) // BLOCK_SIZE :]
                assert {self.slots[block, 0][1] for block in seen} <= {sequence.request}

    def check_slots(self, sequence: Running, num_computed: int | None = None) -> None:
        """All that queries from `num_computed` on see is there."""
        begin = sequence.num_computed if num_computed is None else num_computed
        tables = self.manager.block_tables(sequence.name)
        for group, (window, table) in enumerate(zip(WINDOWS, tables, strict=True)):
            for position in range(first_seen(window, begin), sequence.num_computed):
                slot = (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                assert self.slots[slot][::2] == (group, tuple(sequence.tokens[: position + 1]))

    def compute(self, sequence: Running, count: int) -> bool:
        """What a step does: allocate, then write K and V of the next tokens."""
        name, begin = sequence.name, sequence.num_computed
        end = min(begin + count, len(sequence.tokens))
        lengths = [len(table) for table in self.manager.block_tables(name)]
        missing = sum(max(0, -(-end // BLOCK_SIZE) - length) for length in lengths)
        if not self.manager.allocate_slots(name, end, begin):
            assert missing > self.manager.num_free_blocks
            assert [len(table) for table in self.manager.block_tables(name)] == lengths
            return False
        tables = self.manager.block_tables(name)
        for group, (window, table) in enumerate(zip(WINDOWS, tables, strict=True)):
            held = len(table) - first_seen(window, begin) // BLOCK_SIZE
            if window is not None:
                assert held <= -(-(window + MAX_CHUNK) // BLOCK_SIZE) + 1
            for position in range(begin, end):
                slot = (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                self.slots[slot] = (group, sequence.request, tuple(sequence.tokens[: position + 1]))
        sequence.num_computed = end
        self.check_slots(sequence, begin)
        return True

    def remember(self, sequence: Running) -> None:
        self.manager.remember_blocks(sequence.name, sequence.tokens, sequence.num_computed)

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 1), max_size=5),
        count=st.integers(1, MAX_CHUNK),
    )
    def advance(self, data: st.DataObject, tokens: list[int], count: int) -> None:
        sequence = self.pick(data)
        if len(sequence.tokens) < 40:
            sequence.tokens += tokens
        self.compute(sequence, count)
        if data.draw(st.booleans()):
            self.remember(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_one(self.pick(data))

    def finish_one(self, sequence: Running) -> None:
        self.running.remove(sequence)
        self.manager.free(sequence.name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """It starts anew, with its own hasher and with its answer so far."""
        sequence = self.pick(data)
        self.running.remove(sequence)
        self.manager.free(sequence.name)
        self.admit(sequence)

    @precondition(lambda self: self.num_started % 5 == 4)
    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        for prompt in PROMPTS:
            hasher = self.manager.new_hasher("a")
            assert self.manager.get_computed_blocks("probe", hasher, prompt, 20) == 0
            self.manager.free("probe")

    @invariant()
    def agrees(self) -> None:
        self.manager.check_integrity()
        assert self.manager.num_sequences == len(self.running)
        for sequence in self.running:
            self.check_slots(sequence)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
ManagerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

TestPool = PoolMachine.TestCase
TestManager = ManagerMachine.TestCase


# ---- what the machines leave to chance ----


def test_oldest_free_block_is_reused_first() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    for block, name in zip((*first, *second), NAMES, strict=False):
        pool.remember(block, name)
    pool.free(second)
    pool.free(first)
    # The end of what was freed first, then its beginning, which others are likelier to share.
    assert pool.allocate(5) == [*reversed(second), *reversed(first)]


def test_a_free_block_without_a_name_is_reused_before_all_others() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.remember(first[0], b"x")
    pool.free(first)
    pool.free(second)
    assert pool.allocate(5) == [*second, first[1], 4, first[0]]


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
