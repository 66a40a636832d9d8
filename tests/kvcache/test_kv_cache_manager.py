"""Prefix hits, limits, salts, and which block is given up first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tightkv.kvcache import KVCacheManager
from tightkv.kvcache.block_hash import BlockHasher

PROMPT = list(range(50, 70))


def make_manager(
    num_blocks: int = 10,
    windows: Sequence[int | None] = (None,),
    enable_prefix_caching: bool = True,
    max_chunk: int = 100,
) -> KVCacheManager:
    return KVCacheManager(
        windows, num_blocks, 4, b"seed", enable_prefix_caching, max_chunk=max_chunk
    )


def run(
    manager: KVCacheManager, seq_id: str, tokens: list[int], request_id: str = "request"
) -> tuple[int, BlockHasher]:
    """Start a sequence, compute all of its tokens, offer its blocks; returns the tokens found."""
    hasher = manager.new_hasher(request_id)
    found = manager.get_computed_blocks(seq_id, hasher, tokens, len(tokens) - 1)
    assert manager.allocate_slots(seq_id, len(tokens))
    manager.remember_blocks(seq_id, tokens, len(tokens))
    manager.check_integrity()
    return found, hasher


def hits(manager: KVCacheManager, tokens: list[int], request_id: str = "request") -> int:
    hasher = manager.new_hasher(request_id)
    found = manager.get_computed_blocks("probe", hasher, tokens, len(tokens))
    manager.free("probe")
    return found


def test_second_request_starts_with_the_blocks_of_the_first() -> None:
    manager = make_manager()
    assert run(manager, "a", PROMPT)[0] == 0
    assert run(manager, "b", [*PROMPT[:12], 1, 2, 3, 4, 5])[0] == 12
    a, b = manager.block_tables("a")[0], manager.block_tables("b")[0]
    assert a[:3] == b[:3]
    assert not set(a[3:]) & set(b[3:])
    assert manager.num_free_blocks == 10 - 5 - 2
    assert manager.num_sequences == 2


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (0, "number 0 of [ab], holds other tokens"),
        (5, "number 5 of [ab], is shared, but not full"),
    ],
)
def test_check_integrity_notices_a_block_that_must_not_be_shared(index: int, words: str) -> None:
    """Reference counts fit, but the tokens of the two sequences do not."""
    manager = make_manager(12)
    run(manager, "a", [*PROMPT, 1])
    run(manager, "b", [*PROMPT[::-1], 1])
    mine, others = manager.block_tables("b")[0], manager.block_tables("a")[0]
    pool = manager._pool
    pool.free([mine[index]])
    mine[index] = others[index]
    pool.touch([others[index]])
    pool.check_integrity()
    with pytest.raises(AssertionError, match=words):
        manager.check_integrity()


def test_at_most_all_but_one_token_is_taken() -> None:
    """Some token must be computed, for its logits."""
    manager = make_manager()
    run(manager, "a", PROMPT[:8])
    assert run(manager, "b", PROMPT[:8])[0] == 4
    assert run(manager, "c", PROMPT[:9])[0] == 8


@pytest.mark.parametrize(("limit", "found"), [(0, 0), (3, 0), (4, 4), (15, 12), (20, 20)])
def test_max_tokens(limit: int, found: int) -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    hasher = manager.new_hasher("b")
    assert manager.get_computed_blocks("b", hasher, PROMPT, limit) == found
    assert manager.block_tables("b") == [manager.block_tables("a")[0][: found // 4]]


def test_found_blocks_survive_their_maker() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    blocks = manager.block_tables("a")[0].copy()
    manager.free("a")
    assert manager.num_free_blocks == 10
    assert run(manager, "b", [*PROMPT, 1])[0] == 20
    assert manager.block_tables("b")[0][:5] == blocks


def test_only_computed_blocks_are_offered() -> None:
    manager = make_manager()
    hasher = manager.new_hasher("a")
    manager.get_computed_blocks("a", hasher, PROMPT, 19)
    assert manager.allocate_slots("a", 20)
    assert hits(manager, PROMPT) == 0
    manager.remember_blocks("a", PROMPT, 11)
    assert hits(manager, PROMPT) == 8
    manager.remember_blocks("a", PROMPT, 20)
    assert hits(manager, PROMPT) == 20


def test_answers_are_shared_too() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT[:6])
    tokens = [*PROMPT[:6], 1, 2, 3]
    assert manager.allocate_slots("a", 9)
    manager.remember_blocks("a", tokens, 9)
    assert hits(manager, tokens) == 8


def test_without_prefix_caching_only_one_request_shares() -> None:
    manager = make_manager(enable_prefix_caching=False)
    run(manager, "r/0", PROMPT, "r")
    assert hits(manager, PROMPT, "r") == 20
    assert hits(manager, PROMPT, "s") == 0


def test_with_prefix_caching_the_request_does_not_matter() -> None:
    manager = make_manager()
    run(manager, "r/0", PROMPT, "r")
    assert hits(manager, PROMPT, "s") == 20


def test_managers_with_other_seeds_have_other_names() -> None:
    names = [
        KVCacheManager((None,), 4, 4, seed, max_chunk=1).new_hasher("r").full_blocks(PROMPT, 20)
        for seed in (b"int8", b"fp8")
    ]
    assert not set(names[0]) & set(names[1])


def test_longest_unused_content_goes_first_and_its_end_before_its_beginning() -> None:
    manager = make_manager(num_blocks=6)
    old, new = PROMPT[:12], [7] * 12
    run(manager, "old", old)
    run(manager, "new", new)
    manager.free("old")
    manager.free("new")
    run(manager, "x", [1, 2, 3])
    assert hits(manager, old) == 8
    assert hits(manager, new) == 12


def test_using_content_makes_it_young() -> None:
    manager = make_manager(num_blocks=6)
    run(manager, "a", PROMPT[:12])
    run(manager, "b", [7] * 12)
    manager.free("a")
    manager.free("b")
    assert hits(manager, PROMPT[:12]) == 12
    for index in range(3):
        run(manager, f"x{index}", [index, 2, 3])
    assert hits(manager, PROMPT[:12]) == 12
    assert hits(manager, [7] * 12) == 0


def test_no_room_changes_nothing() -> None:
    manager = make_manager(num_blocks=5)
    run(manager, "a", PROMPT[:12])
    _, hasher = run(manager, "b", [1, 2])
    before = manager.block_tables("b")[0].copy()
    assert not manager.allocate_slots("b", 13)
    assert manager.block_tables("b")[0] == before
    assert manager.num_free_blocks == 1
    manager.free("a")
    assert manager.allocate_slots("b", 13)
    assert hasher.full_blocks([1, 2, 3, 4], 4)


def test_room_that_is_there_already() -> None:
    manager = make_manager(num_blocks=2)
    run(manager, "a", PROMPT[:5])
    assert manager.allocate_slots("a", 8)
    assert manager.allocate_slots("a", 1)
    assert not manager.allocate_slots("a", 9)
    assert len(manager.block_tables("a")[0]) == 2


def test_preempted_sequence_finds_its_blocks_again() -> None:
    manager = make_manager(num_blocks=6)
    _, hasher = run(manager, "a", PROMPT)
    manager.free("a")
    assert manager.get_computed_blocks("a", hasher, PROMPT, 19) == 16
    manager.check_integrity()


def test_free_twice_is_harmless() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    manager.free("a")
    manager.free("a")
    manager.free("never started")
    assert manager.num_free_blocks == 10
    manager.check_integrity()


def test_groups_have_tables_of_their_own() -> None:
    manager = make_manager(12, windows=(None, None))
    run(manager, "a", PROMPT)
    assert run(manager, "b", [*PROMPT, 1])[0] == 20
    a, b = manager.block_tables("a"), manager.block_tables("b")
    assert len(a) == len(b) == 2
    for group in range(2):
        assert a[group] == b[group][:5]
        assert len(set(b[group])) == 6
    assert not set(b[0]) & set(b[1])
    assert manager.num_free_blocks == 0


def test_reset_forgets_all_content_but_takes_no_block() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    table = manager.block_tables("a")[0].copy()
    manager.reset_prefix_cache()
    assert manager.block_tables("a")[0] == table
    assert hits(manager, PROMPT) == 0
    manager.free("a")
    assert hits(manager, PROMPT) == 0
    manager.check_integrity()


def test_check_integrity_notices_a_leak() -> None:
    manager = make_manager()
    run(manager, "a", PROMPT)
    manager.block_tables("a")[0].pop()
    with pytest.raises(AssertionError, match="leaks"):
        manager.check_integrity()


# ---- windows; blocks of 4 tokens ----

LONG = list(range(100, 140))


def test_blocks_before_the_window_are_given_back() -> None:
    """The query at 12 sees the keys from 7 on, which lie in block 1."""
    manager = make_manager(windows=(6,), max_chunk=4)
    hasher = manager.new_hasher("a")
    manager.get_computed_blocks("a", hasher, LONG, 39)
    for computed in range(0, 40, 4):
        assert manager.allocate_slots("a", computed + 4, computed)
        passed = max(0, computed - 5) // 4
        (table,) = manager.block_tables("a")
        assert table[:passed] == [0] * passed
        assert len(table) == computed // 4 + 1
        assert manager.num_blocks_of("a") == len(table) - passed <= 3
        assert manager.num_used_blocks() == (manager.num_blocks_of("a"),)
        manager.check_integrity()
    manager.free("a")
    assert manager.num_free_blocks == 10


def test_a_whole_prompt_gets_room_for_its_largest_chunk() -> None:
    """20 tokens of full attention, and a window of 6 with chunks of 4: 9 tokens in 3 blocks."""
    manager = make_manager(8, windows=(None, 6), max_chunk=4)
    hasher = manager.new_hasher("a")
    manager.get_computed_blocks("a", hasher, PROMPT, 19)
    assert manager.allocate_slots("a", 20, 0)
    assert [len(table) for table in manager.block_tables("a")] == [5, 3]
    assert manager.num_free_blocks == 0
    for computed in range(0, 20, 4):
        assert manager.allocate_slots("a", computed + 4, computed)
    assert not manager.allocate_slots("a", 40, 20)


def filled(windows: tuple[int | None, ...], num_blocks: int) -> KVCacheManager:
    """A pool in which a sequence has computed `LONG` chunk by chunk, and has ended."""
    manager = make_manager(num_blocks, windows, max_chunk=4)
    hasher = manager.new_hasher("a")
    manager.get_computed_blocks("a", hasher, LONG, 39)
    for computed in range(0, 40, 4):
        assert manager.allocate_slots("a", computed + 4, computed)
        manager.remember_blocks("a", LONG, computed + 4)
    manager.free("a")
    return manager


@pytest.mark.parametrize("windows", [(6,), (None, 6), (6, None), (6, 2, None)])
def test_blocks_that_have_left_the_window_are_found_while_nobody_takes_them(
    windows: tuple[int | None, ...],
) -> None:
    manager = filled(windows, 10 * len(windows))
    for length in (40, 24, 4):
        assert hits(manager, LONG[:length]) == length
    manager.get_computed_blocks("b", manager.new_hasher("b"), LONG, 39)
    held = {None: 9, 6: 2, 2: 1}  # the query at 36 sees the keys from 31, and from 35 on
    assert manager.num_used_blocks() == tuple(held[window] for window in windows)
    manager.check_integrity()


def test_the_longest_beginning_whose_window_is_there() -> None:
    """Three blocks hold the end only; in ten, the first three are taken by another sequence."""
    end = filled((6,), 3)
    assert [hits(end, LONG[:length]) for length in (40, 36, 32)] == [40, 36, 0]
    manager = filled((6,), 10)
    hasher = manager.new_hasher("x")
    manager.get_computed_blocks("x", hasher, [1], 0)
    assert manager.allocate_slots("x", 12, 0)  # the blocks freed longest ago: 0, 1 and 2
    assert [hits(manager, LONG[:length]) for length in (12, 16, 20, 40)] == [0, 0, 20, 40]


def test_every_group_must_serve_the_beginning() -> None:
    """A window's blocks do not help where the full ones are gone, nor the other way round."""
    manager = filled((None, 6), 20)
    full = [manager._find(0, name) for name in manager.new_hasher("").full_blocks(LONG, 40)]
    assert None not in full
    manager._pool.forget([full[7]])  # type: ignore[list-item]
    assert hits(manager, LONG) == 28
    window = manager._find(1, manager.new_hasher("").full_blocks(LONG, 40)[6])
    manager._pool.forget([window])  # type: ignore[list-item]
    assert hits(manager, LONG) == 24
    full_2 = manager._find(0, manager.new_hasher("").full_blocks(LONG, 40)[2])
    manager._pool.forget([full_2])  # type: ignore[list-item]
    assert hits(manager, LONG) == 8


def test_blocks_that_go_to_another_group_are_cleared() -> None:
    cleared: list[int] = []
    manager = KVCacheManager((None, 6), 4, 4, b"seed", max_chunk=4, clear=cleared.extend)

    def tables_of(seq_id: str, num_tokens: int) -> list[list[int]]:
        manager.get_computed_blocks(seq_id, manager.new_hasher(seq_id), PROMPT, 0)
        assert manager.allocate_slots(seq_id, num_tokens)
        return manager.block_tables(seq_id)

    first = [list(table) for table in tables_of("a", 8)]
    assert [len(table) for table in first] == [2, 2]
    assert cleared == []  # zeros from the start
    manager.free("a")
    second = tables_of("b", 8)
    changed = set(second[0]) & set(first[1]) | set(second[1]) & set(first[0])
    assert set(cleared) == changed
    assert changed
