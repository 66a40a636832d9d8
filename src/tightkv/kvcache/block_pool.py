"""Which blocks are in use, by how many sequences, and what the free ones still hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

__all__ = ["BlockPool", "Poison"]

Poison = Callable[[Sequence[int], bool], None]
"""Overwrites blocks whose content is lost; True: they are in use now, and may be read in part."""

Evicted = Sequence[tuple[int, bytes]]
"""Blocks, and the hashes of their contents."""


class BlockPool:
    """Block ids, with reference counts and a memory of what they hold.

    A block is free when no sequence uses it. Free blocks keep their content: one whose content
    has a hash can be taken back by `touch` until `allocate` gives it to somebody else. First go
    those whose content has none, the last one freed first: its memory is in the processor's caches
    and in the process already. Then the block that was freed longest ago.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[Evicted], None] | None = None
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}
        self.poison: Poison | None = None

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content can be taken back."""
        return sum(map(self._hash_of_block.__contains__, self._free))

    def ref_count(self, block: int) -> int:
        """Sequences that use the block."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, whose content is forgotten.

        Raises:
            ValueError: if there are fewer; the caller looks at `num_free_blocks` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks were asked for, {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        hashes = self._hash_of_block
        evicted = [(block, hashes[block]) for block in blocks if block in hashes]
        self.forget(blocks)
        for block in blocks:
            self._ref_counts[block] = 1
        if evicted and self.on_evict is not None:
            self.on_evict(evicted)
        if self.poison is not None:
            self.poison(blocks, True)
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """Use blocks that hold what is needed; they leave the free ones."""
        for block in blocks:
            self._free.pop(block, None)
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one use of each block. Of those with content the last one is reused first."""
        for block in reversed(blocks):
            if self._ref_counts[block] == 0:
                raise ValueError(f"block {block} is freed, but nobody uses it")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_of_block:
                    self._free.move_to_end(block, last=False)
                    if self.poison is not None:
                        self.poison([block], False)

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this content, in use or free."""
        return self._block_of_hash.get(block_hash)

    def hash_of(self, block: int) -> bytes | None:
        """The content of a block, where it is known."""
        return self._hash_of_block.get(block)

    def remember(self, block: int, block_hash: bytes) -> None:
        """Note the content of a full block. A second block with the same content stays unknown."""
        if block_hash not in self._block_of_hash and block not in self._hash_of_block:
            self._block_of_hash[block_hash] = block
            self._hash_of_block[block] = block_hash

    def forget_all(self) -> None:
        """Forget all content, so that nothing is taken back."""
        if self.poison is not None:
            self.poison([block for block in self._hash_of_block if block in self._free], False)
        self._block_of_hash.clear()
        self._hash_of_block.clear()

    def forget(self, blocks: Sequence[int]) -> None:
        """Forget the content of these blocks."""
        for block in blocks:
            block_hash = self._hash_of_block.pop(block, None)
            if block_hash is not None:
                del self._block_of_hash[block_hash]

    def letters(self) -> str:
        """A letter per block: `u` used, `s` used by several, `c` free with content, `.` free."""
        return "".join(
            ("u" if count == 1 else "s")
            if count
            else ("c" if block in self._hash_of_block else ".")
            for block, count in enumerate(self._ref_counts)
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if the pool contradicts itself."""
        for block, count in enumerate(self._ref_counts):
            assert count >= 0, f"block {block} has {count} users"
            assert (count == 0) == (block in self._free), f"block {block} is free and used"
        for block_hash, block in self._block_of_hash.items():
            assert self._hash_of_block.get(block) == block_hash, f"hash of block {block} differs"
        assert len(self._block_of_hash) == len(self._hash_of_block), "hashes do not match blocks"
