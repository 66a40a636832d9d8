"""Names of block contents: equal tokens after equal beginnings, in an equal cache."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

__all__ = ["BlockHasher"]


class BlockHasher:
    """Chained hashes of the full blocks of one sequence.

    The hash of a block covers its tokens and all tokens before it. `seed` tells caches apart
    (model, formats, scales) and `salt` requests that must not share.
    """

    def __init__(self, block_size: int, seed: bytes, salt: str = "") -> None:
        self._block_size = block_size
        self._root = hashlib.sha256(seed + salt.encode()).digest()
        self._hashes: list[bytes] = []

    @property
    def known(self) -> tuple[bytes, ...]:
        """The hashes made so far."""
        return tuple(self._hashes)

    def full_blocks(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Hashes of the full blocks among the first `num_tokens` tokens.

        `token_ids` may grow from call to call, but never change.
        """
        for block in range(len(self._hashes), num_tokens // self._block_size):
            start = block * self._block_size
            tokens = array("q", token_ids[start : start + self._block_size])
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return self._hashes[: num_tokens // self._block_size]
