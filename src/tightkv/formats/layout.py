"""Where the codes and scales of a block lie. docs/formats.md shows it as a picture.

A block holds `block_size` tokens of every KV head of one layer. Tokens come in tiles of 16, since
a CPU kernel takes one token (for K) or one channel (for V) per SIMD lane:

    K tile: [head_size / i][16 tokens][i channels]           V tile: [16 / i][16 channels][i tokens]

where i is the code's `interleave`. Dynamic scales follow the codes, inside the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightkv.formats.base import TensorFormat

__all__ = ["TILE", "BlockLayout"]

TILE = 16
"""Tokens per tile, and channels per tile of V."""

_ALIGNMENT = 64  # one cache line, in which the codes of K, those of V, and scales begin


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Bytes of one block of one layer: K codes, V codes, K scales, V scales.

    Attributes:
        head_size: channels of K (and of the query).
        value_size: channels of V (and of the output).
    """

    k_format: TensorFormat
    v_format: TensorFormat
    num_kv_heads: int
    head_size: int
    value_size: int
    block_size: int

    @property
    def padded_head_size(self) -> int:
        """Channels of K as stored: even, since integer codes are multiplied in pairs."""
        return _round_up(self.head_size, 2)

    @property
    def padded_value_size(self) -> int:
        """Channels of V as stored: whole tiles of lanes."""
        return _round_up(self.value_size, TILE)

    @property
    def v_offset(self) -> int:
        values = self.num_kv_heads * self.padded_head_size * self.block_size
        return _round_up(values * self.k_format.code.num_bytes, _ALIGNMENT)

    @property
    def k_scale_offset(self) -> int:
        values = self.num_kv_heads * self.padded_value_size * self.block_size
        return self.v_offset + _round_up(values * self.v_format.code.num_bytes, _ALIGNMENT)

    @property
    def v_scale_offset(self) -> int:
        # Scales of K and V lie side by side: of both, one block of 16 tokens has whole lines.
        return self.k_scale_offset + self.num_kv_heads * self.k_format.scale_bytes(self.block_size)

    @property
    def block_bytes(self) -> int:
        """All bytes of a block, padding and scales included."""
        scale_bytes = self.num_kv_heads * self.v_format.scale_bytes(self.block_size)
        return _round_up(self.v_scale_offset + scale_bytes, _ALIGNMENT)

    @property
    def k_bytes(self) -> int:
        """Bytes of a block that K takes, padding and scales included."""
        return self.v_offset + self.v_scale_offset - self.k_scale_offset

    @property
    def v_bytes(self) -> int:
        """Bytes of a block that V takes: the rest."""
        return self.block_bytes - self.k_bytes

    def k_codes(self, blocks: torch.Tensor) -> torch.Tensor:
        """View of K codes, `[num_blocks, num_kv_heads, tiles, head_size / i, 16, i]`."""
        code = self.k_format.code
        shape = (self.padded_head_size // code.interleave, TILE, code.interleave)
        return self._section(blocks, 0, code.dtype, self.padded_head_size, shape)

    def v_codes(self, blocks: torch.Tensor) -> torch.Tensor:
        """View of V codes, `[num_blocks, num_kv_heads, tiles, value_size / 16, 16 / i, 16, i]`."""
        code = self.v_format.code
        shape = (self.padded_value_size // TILE, TILE // code.interleave, TILE, code.interleave)
        return self._section(blocks, self.v_offset, code.dtype, self.padded_value_size, shape)

    def k_scales(self, blocks: torch.Tensor) -> torch.Tensor | None:
        """View of K's dynamic scales, float16 `[num_blocks, num_kv_heads, block_size]`."""
        return self._scales(blocks, self.k_format, self.k_scale_offset)

    def v_scales(self, blocks: torch.Tensor) -> torch.Tensor | None:
        """View of V's dynamic scales, float16 `[num_blocks, num_kv_heads, block_size]`."""
        return self._scales(blocks, self.v_format, self.v_scale_offset)

    def _section(
        self,
        blocks: torch.Tensor,
        offset: int,
        dtype: torch.dtype,
        size: int,
        tile_shape: tuple[int, ...],
    ) -> torch.Tensor:
        num_bytes = self.num_kv_heads * self.block_size * size * dtype.itemsize
        # float8 tensors cannot be indexed everywhere; their bytes can.
        stored = torch.uint8 if dtype.itemsize == 1 and dtype.is_floating_point else dtype
        section = blocks[:, offset : offset + num_bytes].view(stored)
        return section.view(-1, self.num_kv_heads, self.block_size // TILE, *tile_shape)

    def _scales(
        self, blocks: torch.Tensor, tensor_format: TensorFormat, offset: int
    ) -> torch.Tensor | None:
        num_bytes = self.num_kv_heads * tensor_format.scale_bytes(self.block_size)
        if not num_bytes:
            return None
        section = blocks[:, offset : offset + num_bytes].view(torch.float16)
        return section.view(-1, self.num_kv_heads, self.block_size)
