"""Names of block contents."""

from __future__ import annotations

from tightkv.kvcache.block_hash import BlockHasher

TOKENS = list(range(100, 120))


def hashes(tokens: list[int], seed: bytes = b"seed", salt: str = "", size: int = 4) -> list[bytes]:
    return BlockHasher(size, seed, salt).full_blocks(tokens, len(tokens))


def test_full_blocks_only() -> None:
    assert len(hashes(TOKENS[:3])) == 0
    assert len(hashes(TOKENS[:4])) == 1
    assert len(hashes(TOKENS[:11])) == 2
    assert len(BlockHasher(4, b"").full_blocks(TOKENS, 7)) == 1


def test_equal_beginnings_have_equal_names() -> None:
    longer = hashes(TOKENS)
    shorter = hashes(TOKENS[:12] + [7] * 8)
    assert longer[:3] == shorter[:3]
    assert longer[3] != shorter[3]
    assert len(set(longer)) == 5


def test_a_name_covers_all_tokens_before() -> None:
    changed = [0, *TOKENS[1:]]
    assert not set(hashes(TOKENS)) & set(hashes(changed))
    repeated = hashes([5, 6, 7, 8] * 3)
    assert len(set(repeated)) == 3


def test_order_and_neighbouring_tokens_matter() -> None:
    assert hashes([1, 2, 3, 4]) != hashes([4, 3, 2, 1])
    assert hashes([1, 256, 0, 0]) != hashes([1, 0, 256, 0])
    assert hashes([11, 1, 0, 0]) != hashes([1, 11, 0, 0])


def test_seed_and_salt() -> None:
    plain = hashes(TOKENS)
    assert not set(plain) & set(hashes(TOKENS, seed=b"other"))
    assert not set(plain) & set(hashes(TOKENS, salt="request"))
    assert not set(hashes(TOKENS, salt="a")) & set(hashes(TOKENS, salt="b"))


def test_growing_gives_the_same_names_as_at_once() -> None:
    hasher = BlockHasher(4, b"seed")
    tokens: list[int] = []
    for token in TOKENS:
        tokens.append(token)
        assert hasher.full_blocks(tokens, len(tokens)) == hashes(tokens)
    assert hasher.full_blocks(tokens, 9) == hashes(tokens)[:2]
