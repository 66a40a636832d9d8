"""The bytes of the cache: one tensor of blocks per layer, or one of pages for all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy
import torch

from tightkv.errors import InsufficientMemoryError
from tightkv.formats import BlockLayout, KVCacheScales, LayerScales, TensorScale
from tightkv.kernels import (
    AttentionParams,
    Backend,
    LayerCache,
    LayerStep,
    paged_attention,
    reshape_and_cache,
)
from tightkv.kvcache.metadata import AttentionMetadata
from tightkv.kvcache.spec import LayerGroup

__all__ = ["KVCacheStorage"]


_CACHE_LINE = 64

# Repeated, the first byte is a NaN in every floating format, the other a large finite number in
# every one, and near the largest as a code of int8.
_NAN_BYTE, _LARGE_BYTE = 0xFF, 0x7B


class KVCacheStorage:
    """Blocks, static scales and clip counts of every layer, and the two things done with them.

    Attributes:
        clip_table: int64 `[num_layers, 2]`, the clip counts where the kernels add to them.
    """

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        num_blocks: int,
        device: torch.device,
        backend: Backend,
        scales: KVCacheScales | None = None,
        kv_sources: Mapping[int, int] | None = None,
    ) -> None:
        """Allocate `num_blocks` blocks: for each layer, or pages that all groups share.

        Args:
            groups: the layers.
            num_blocks: block ids of the pool.
            device: where the blocks lie.
            backend: the kernels that read and write them.
            scales: static scales of the layers that have some.
            kv_sources: layers that read the K and V of another layer, and which.

        Raises:
            InsufficientMemoryError: if the memory cannot be had.
        """
        self.groups = groups
        self.num_blocks = num_blocks
        self.backend = backend
        self._kv_sources = dict(kv_sources or {})
        self._group_of: dict[int, int] = {}
        self._layers: dict[int, LayerCache] = {}
        self._clip_counts: dict[int, torch.Tensor] = {}
        self._num_written = 0
        num_layers = sum(len(group.specs) for group in groups)
        self.clip_table = torch.zeros(num_layers, 2, dtype=torch.int64, device=device)
        self._known_clips: Sequence[Sequence[int]] | None = None
        pages = None
        if groups[0].shares_pages:
            pages = _allocate("all layers", num_blocks, groups[0].page_bytes, device)
        for index, group in enumerate(groups):
            for spec, layout in zip(group.specs, group.layouts, strict=True):
                backend.check_layout(layout)
                blocks = pages
                if blocks is None:
                    layer = f"layer {spec.layer_idx}"
                    blocks = _allocate(layer, num_blocks, layout.stride, device)
                layer_scales = (scales or {}).get(spec.layer_idx, LayerScales())
                self._group_of[spec.layer_idx] = index
                self._layers[spec.layer_idx] = _layer_cache(blocks, layout, layer_scales)
                self._clip_counts[spec.layer_idx] = self.clip_table[len(self._clip_counts)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, as allocated."""
        return sum(blocks.numel() for blocks in self.tensors())

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros, which are finite codes of every format."""
        self._fill(blocks, 0)

    def count_written(self, num_tokens: int) -> None:
        """Note that a step wrote so many tokens to all layers."""
        self._num_written += num_tokens

    def note_clips(self, table: Sequence[Sequence[int]]) -> None:
        """Take what came along with a step's results for `clip_table` from now on."""
        self._known_clips = table

    def clip_counts(self) -> dict[int, tuple[int, int]]:
        """Values of K and of V clipped so far, by layer; waits for a device unless noted."""
        table = self.clip_table.tolist() if self._known_clips is None else self._known_clips
        return {layer: (k, v) for layer, (k, v) in zip(self._clip_counts, table, strict=True)}

    def clip_rates(self) -> dict[int, tuple[float, float]]:
        """Clipped values of K and of V as shares of those written so far, by layer."""
        rates = {}
        for layer, (k, v) in self.clip_counts().items():
            layout = self._layers[layer].layout
            heads = max(1, self._num_written) * layout.num_kv_heads
            rates[layer] = (k / (heads * layout.head_size), v / (heads * layout.value_size))
        return rates

    def layer(self, layer_idx: int) -> LayerCache:
        """Blocks and formats that a layer reads."""
        return self._layers[self._source(layer_idx)]

    def write(
        self, layer_idx: int, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        """Store K and V `[num_tokens, num_kv_heads, size]`, unless another layer stores them."""
        if layer_idx in self._kv_sources:
            return
        reshape_and_cache(
            self.backend,
            self._layers[layer_idx],
            key,
            value,
            metadata.slot_mappings[self._group_of[layer_idx]],
            self._clip_counts[layer_idx],
            metadata.bad_tokens,
        )

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attention of `[num_tokens, num_heads, head_size]` over the layer's cache."""
        source = self._source(layer_idx)
        batch = metadata.batches[self._group_of[source]]
        return paged_attention(self.backend, query, self._layers[source], batch, params)

    def step_of(self, layer_idx: int, metadata: AttentionMetadata, *, rows_only: bool) -> LayerStep:
        """What the step gives a layer with K and V of its own; all of its tokens are written.

        Args:
            layer_idx: the layer.
            metadata: of the step.
            rows_only: whether only the tokens of `metadata.rows` come out.
        """
        group = self._group_of[layer_idx]
        selects = rows_only and metadata.rows is not None
        return LayerStep(
            cache=self._layers[layer_idx],
            batch=(metadata.row_batches if selects else metadata.batches)[group],
            slot_mapping=metadata.slot_mappings[group],
            clip_counts=self._clip_counts[layer_idx],
            bad_tokens=metadata.bad_tokens,
            rows=metadata.rows if selects else None,
        )

    def poison(self, blocks: Sequence[int], are_used: bool) -> None:
        """Overwrite lost blocks, so that nobody reads them unnoticed (--debug-integrity).

        Args:
            blocks: ids.
            are_used: whether a sequence has them now. What it has not written yet is multiplied
                by 0, and must be finite.
        """
        codes = [layer.layout.v_format.code for layer in self._layers.values()]
        can_be_nan = not are_used and all(code.dtype.is_floating_point for code in codes)
        self._fill(blocks, _NAN_BYTE if can_be_nan else _LARGE_BYTE)

    def fingerprint(self) -> bytes:
        """Digest of formats and static scales: blocks of another fingerprint are not reused."""
        digest = hashlib.sha256()
        for layer_idx, layer in sorted(self._layers.items()):
            digest.update(repr((layer_idx, layer.layout)).encode())
            for factors in (layer.k_scale, layer.v_scale):
                if factors is not None:
                    digest.update(TensorScale(factors).fingerprint())
        return digest.digest()

    def tensors(self) -> Iterable[torch.Tensor]:
        """Each tensor of blocks once, of layers or of pages."""
        return {id(layer.blocks): layer.blocks for layer in self._layers.values()}.values()

    def _fill(self, blocks: Sequence[int], byte: int) -> None:
        for tensor in self.tensors():
            if tensor.device.type == "cpu":
                tensor[list(blocks)] = byte
                continue
            for block in blocks:  # a list of them would be sent there, and be waited for
                tensor[block].fill_(byte)

    def _source(self, layer_idx: int) -> int:
        return self._kv_sources.get(layer_idx, layer_idx)


def _zeros(num_blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    """Blocks of zeros, so that none is ever read as garbage."""
    if device.type != "cpu":
        return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    # numpy leaves the zeros to the system, which takes no memory until a block is written;
    # torch writes them. Blocks start on a cache line.
    size = num_blocks * block_bytes
    memory = numpy.zeros(size + _CACHE_LINE, dtype=numpy.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[start : start + size]).view(num_blocks, block_bytes)


def _allocate(whose: str, num_blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    try:
        return _zeros(num_blocks, block_bytes, device)
    except torch.OutOfMemoryError:
        raise  # whoever starts the engine knows the device's memory
    except (RuntimeError, MemoryError) as error:
        raise InsufficientMemoryError(
            f"The KV cache of {whose} needs {num_blocks * block_bytes} bytes "
            f"on {device}, which could not be had: lower --kv-cache-memory-bytes, --max-model-len "
            "or --max-num-seqs, or choose a narrower --kv-cache-dtype."
        ) from error


def _layer_cache(blocks: torch.Tensor, layout: BlockLayout, scales: LayerScales) -> LayerCache:
    k_scale, v_scale = (
        None if scale is None else scale.per_channel(layout.num_kv_heads, size).to(blocks.device)
        for scale, size in ((scales.k, layout.head_size), (scales.v, layout.value_size))
    )
    return LayerCache(blocks, layout, k_scale, v_scale)
