"""Prefix hits, limits, salts, and which block is given up first."""

from __future__ import annotations

import pytest

from tightkv.kvcache import KVCacheManager
from tightkv.kvcache.block_hash import BlockHasher

PROMPT = list(range(50, 70))


def make_manager(num_blocks: int = 10, num_groups: int = 1, **kwargs: bool) -> KVCacheManager:
    return KVCacheManager(num_groups, num_blocks, 4, b"seed", **kwargs)


def run(
    manager: KVCacheManager, seq_id: str, tokens: list[int], request_id: str = "request"
) -> tuple[int, BlockHasher]:
    """Start a sequence, compute all of its tokens, offer its blocks; returns the tokens found."""
    hasher = manager.new_hasher(request_id)
    found = manager.get_computed_blocks(seq_id, hasher, tokens, len(tokens) - 1)
    assert manager.allocate_slots(seq_id, len(tokens))
    manager.remember_blocks(seq_id, hasher, tokens, len(tokens))
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
    pool = manager._pools[0]
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
    manager.remember_blocks("a", hasher, PROMPT, 11)
    assert hits(manager, PROMPT) == 8
    manager.remember_blocks("a", hasher, PROMPT, 20)
    assert hits(manager, PROMPT) == 20


def test_answers_are_shared_too() -> None:
    manager = make_manager()
    _, hasher = run(manager, "a", PROMPT[:6])
    tokens = [*PROMPT[:6], 1, 2, 3]
    assert manager.allocate_slots("a", 9)
    manager.remember_blocks("a", hasher, tokens, 9)
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
        KVCacheManager(1, 4, 4, seed, True).new_hasher("r").full_blocks(PROMPT, 20)
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
    manager = make_manager(num_groups=2)
    run(manager, "a", PROMPT)
    assert run(manager, "b", [*PROMPT, 1])[0] == 20
    a, b = manager.block_tables("a"), manager.block_tables("b")
    assert len(a) == len(b) == 2
    for group in range(2):
        assert a[group] == b[group][:5]
        assert len(set(b[group])) == 6


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
