"""What one layer stores per block, and which layers share block tables and pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tightkv.formats import BlockLayout, TensorFormat

__all__ = ["KVCacheSpec", "LayerGroup", "are_alike", "group_layers", "layers_by_window"]

_MOST_GROUPS = 16
"""Each has block tables of its own in every step, which takes time."""


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
    """Layers with the same kind of attention; they share block tables and slot mappings.

    Attributes:
        page_bytes: bytes of one block id, the same in all groups of a pool.
        shares_pages: whether other groups take block ids from the same pool. Then a block id
            stands for a page, in which the blocks of the group's layers lie one after another.
    """

    sliding_window: int | None
    specs: tuple[KVCacheSpec, ...]
    page_bytes: int
    shares_pages: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block id that the layers of the group use; what is left is padding."""
        return sum(spec.block_bytes for spec in self.specs)

    @property
    def layouts(self) -> tuple[BlockLayout, ...]:
        """Where each layer's codes and scales lie."""
        if not self.shares_pages:
            return tuple(spec.layout for spec in self.specs)
        sizes = (spec.block_bytes for spec in self.specs)
        return tuple(
            replace(spec.layout, page_bytes=self.page_bytes, k_offset=offset)
            for spec, offset in zip(
                self.specs, itertools.accumulate(sizes, initial=0), strict=False
            )
        )


def group_layers(specs: Iterable[KVCacheSpec]) -> tuple[LayerGroup, ...]:
    """Layers by kind of attention, in the order of first appearance.

    Several kinds take block ids from one pool, so that each id has the same bytes: each kind is
    cut into groups that fill them, 16 at most in all. Where they cannot be filled the rest is
    padding; of all ways to cut, the one is taken that pads the worst kind least.
    """
    kinds = layers_by_window(specs)
    if len(kinds) == 1:
        ((window, layers),) = kinds.items()
        return (LayerGroup(window, layers, sum(spec.block_bytes for spec in layers)),)
    page_bytes = _page_bytes([_sizes(layers) for layers in kinds.values()])
    return tuple(
        LayerGroup(window, group, page_bytes, shares_pages=True)
        for window, layers in kinds.items()
        for group in _cut(layers, _num_groups(_sizes(layers), page_bytes))
    )


def layers_by_window(
    specs: Iterable[KVCacheSpec],
) -> dict[int | None, tuple[KVCacheSpec, ...]]:
    """Layers by kind of attention, in the order of first appearance."""
    kinds: dict[int | None, tuple[KVCacheSpec, ...]] = {}
    for spec in specs:
        kinds[spec.sliding_window] = (*kinds.get(spec.sliding_window, ()), spec)
    return kinds


def are_alike(groups: Sequence[LayerGroup]) -> bool:
    """Whether what one group leaves in a page is as good as any content for the others.

    Kernels may read slots that nobody has written yet, and give them no weight. Codes of the same
    format do no harm there; those of another one can be NaN.
    """
    longest = max((group.layouts for group in groups), key=len)
    return all(group.layouts == longest[: len(group.specs)] for group in groups)


def _sizes(layers: Iterable[KVCacheSpec]) -> list[int]:
    """Bytes of a block of each layer, the largest first."""
    return sorted((spec.block_bytes for spec in layers), reverse=True)


def _cut(layers: Sequence[KVCacheSpec], count: int) -> list[tuple[KVCacheSpec, ...]]:
    """The layers dealt out to `count` groups, the largest first, so that all are as full."""
    ordered = sorted(layers, key=lambda spec: -spec.block_bytes)
    return [tuple(ordered[group::count]) for group in range(count)]


def _num_groups(sizes: Sequence[int], page_bytes: int) -> int:
    """Into how few groups layers must be cut to fit into a page each, dealt out as by `_cut`."""
    return next(count for count in range(1, len(sizes) + 1) if sum(sizes[::count]) <= page_bytes)


def _page_bytes(kinds: Sequence[Sequence[int]]) -> int:
    """Bytes of a page, from the sizes of the layers of each kind."""
    largest = max(sizes[0] for sizes in kinds)
    candidates = {sum(sizes[::count]) for sizes in kinds for count in range(1, len(sizes) + 1)}

    def cost(page_bytes: int) -> tuple[float, int]:
        counts = [_num_groups(sizes, page_bytes) for sizes in kinds]
        waste = max(
            count * page_bytes / sum(sizes) for count, sizes in zip(counts, kinds, strict=True)
        )
        # A hundredth is not worth more groups.
        return round(waste, 2), sum(counts)

    pages = [
        page
        for page in sorted(candidates)
        if page >= largest and sum(_num_groups(sizes, page) for sizes in kinds) <= _MOST_GROUPS
    ]
    # With more than 16 kinds each is one group.
    return min(pages, key=cost) if pages else max(candidates)
