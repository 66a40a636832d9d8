"""What one layer stores per block, and which layers share block tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tightkv.formats import BlockLayout, TensorFormat

__all__ = ["KVCacheSpec", "LayerGroup", "group_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The cache of one layer.

    Attributes:
        head_size: channels of K.
        value_size: channels of V.
        sliding_window: the layer's window in tokens, or None for full attention.
    """

    layer_idx: int
    block_size: int
    num_kv_heads: int
    head_size: int
    value_size: int
    k_format: TensorFormat
    v_format: TensorFormat
    sliding_window: int | None = None

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(
            self.k_format,
            self.v_format,
            self.num_kv_heads,
            self.head_size,
            self.value_size,
            self.block_size,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the only place from which anybody takes them."""
        return self.layout.block_bytes


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same kind of attention; they share block tables and slot mappings."""

    sliding_window: int | None
    specs: tuple[KVCacheSpec, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block id over all layers of the group."""
        return sum(spec.block_bytes for spec in self.specs)


def group_layers(specs: Iterable[KVCacheSpec]) -> tuple[LayerGroup, ...]:
    """Layers by kind of attention, in the order of first appearance."""
    groups: dict[int | None, list[KVCacheSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.sliding_window, []).append(spec)
    return tuple(LayerGroup(window, tuple(members)) for window, members in groups.items())
