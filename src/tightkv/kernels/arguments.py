"""What the kernels are given: tensors and formats, grouped."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightkv.formats.layout import BlockLayout

__all__ = ["AttentionBatch", "AttentionParams", "LayerCache"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """Bytes and formats of one layer.

    Attributes:
        blocks: uint8 `[num_blocks, block_bytes]`.
        layout: where codes and scales lie in a block.
        k_scale: static factors of K, float32 `[num_kv_heads, head_size]`, or None.
        v_scale: static factors of V, float32 `[num_kv_heads, value_size]`, or None.
    """

    blocks: torch.Tensor
    layout: BlockLayout
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Which tokens of which sequences attend.

    Attributes:
        query_start_loc: int32 `[num_seqs + 1]`, exclusive prefix sum of the query lengths.
        seq_lens: int32 `[num_seqs]`, tokens in the cache, this step's included.
        block_table: int32 `[num_seqs, max_blocks]`.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """What a layer's attention computes.

    Attributes:
        softmax_scale: factor of the logits.
        sliding_window: a query at position p sees keys above `p - sliding_window`; None: all.
        softcap: logits become `softcap * tanh(logit / softcap)`.
        sinks: float32 `[num_heads]`, one logit per head that takes weight and gives no value.
    """

    softmax_scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
