"""What the kernels are given: tensors and formats, grouped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tightkv.errors import KernelError
from tightkv.formats.layout import BlockLayout

__all__ = [
    "AttentionBatch",
    "AttentionParams",
    "LayerCache",
    "LayerStep",
    "check_shape",
    "check_tensor",
]


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """Bytes and formats of one layer.

    Attributes:
        blocks: uint8 `[num_blocks, layout.stride]`.
        layout: where codes and scales lie in a block.
        k_scale: static factors of K, float32 `[num_kv_heads, head_size]`, or None.
        v_scale: static factors of V, float32 `[num_kv_heads, value_size]`, or None.
        bound: what backends make of it at the first use and keep.

    Raises:
        KernelError: if a tensor does not fit the layout.
    """

    blocks: torch.Tensor
    layout: BlockLayout
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    bound: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        layout = self.layout
        check_tensor("blocks", self.blocks, torch.uint8, (len(self.blocks), layout.stride))
        for name, factors, size in (
            ("k_scale", self.k_scale, layout.head_size),
            ("v_scale", self.v_scale, layout.value_size),
        ):
            if factors is not None:
                check_tensor(name, factors, torch.float32, (layout.num_kv_heads, size))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Which tokens of which sequences attend.

    Attributes:
        query_start_loc: int32 `[num_seqs + 1]`, exclusive prefix sum of the query lengths.
        seq_lens: int32 `[num_seqs]`, tokens in the cache, this step's included.
        block_table: int32 `[num_seqs, max_blocks]`.
        max_query_len: the longest query, where the host knows it; it saves a GPU a launch.
        bound: what backends make of it at the first use and keep.

    Raises:
        KernelError: if shapes or types do not fit each other.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int | None = None
    bound: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        num_seqs = len(self.seq_lens)
        check_tensor("query_start_loc", self.query_start_loc, torch.int32, (num_seqs + 1,))
        check_tensor("seq_lens", self.seq_lens, torch.int32, (num_seqs,))
        width = self.block_table.shape[-1]
        check_tensor("block_table", self.block_table, torch.int32, (num_seqs, width))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """What a layer's attention computes.

    Attributes:
        softmax_scale: factor of the logits.
        sliding_window: a query at position p sees keys above `p - sliding_window`; None: all.
        softcap: logits become `softcap * tanh(logit / softcap)`.
        sinks: float32 `[num_heads]`, one logit per head that takes weight and gives no value.

    Raises:
        KernelError: for a scale or a softcap that is not positive, or a window of no tokens.
    """

    softmax_scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.softmax_scale > 0:
            raise KernelError(f"softmax_scale is {self.softmax_scale}: give more than 0.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise KernelError(
                f"sliding_window is {self.sliding_window}: give at least 1, or None for all keys."
            )
        if self.softcap is not None and self.softcap <= 0:
            raise KernelError(f"softcap is {self.softcap}: give more than 0, or None for none.")


@dataclass(frozen=True, slots=True, eq=False)
class LayerStep:
    """What a step gives a decoder layer that runs in one call.

    Attributes:
        cache: the layer's blocks.
        batch: lengths and block tables, of the tokens that come out.
        slot_mapping: int64 `[num_tokens]`.
        clip_counts: int64 `[2]`; the clipped values of K and of V are added.
        bad_tokens: bool `[num_tokens]`; set where K or V has a NaN or Inf.
        rows: int64 `[num_rows]`, the tokens that come out; None: all.
    """

    cache: LayerCache
    batch: AttentionBatch
    slot_mapping: torch.Tensor
    clip_counts: torch.Tensor
    bad_tokens: torch.Tensor
    rows: torch.Tensor | None = None


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise KernelError unless a tensor has this shape."""
    if tensor.shape != shape:
        raise KernelError(f"{name} has shape {list(tensor.shape)}, but needs {list(shape)}.")


def check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Raise KernelError unless a tensor is contiguous and of this type and shape."""
    check_shape(name, tensor, shape)
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise KernelError(
            f"{name} is a tensor of {tensor.dtype} with strides {list(tensor.stride())}, but needs "
            f"to be a contiguous one of {dtype}."
        )
