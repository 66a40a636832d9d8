"""What attention needs to know of a step, besides tensors of the layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightkv.kernels import AttentionBatch

__all__ = ["AttentionMetadata"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Positions of a step's tokens in sequences and in the cache.

    Attributes:
        batches: per layer group, lengths of queries and sequences, and block tables.
        slot_mappings: per layer group, int64 `[num_tokens]`.
        bad_tokens: bool `[num_tokens]`, set by any layer that met a NaN or Inf in K or V.
        rows: int64 `[num_rows]`, the tokens that come out of the last layer; None: all.
        row_batches: as `batches`, with the queries of these tokens alone.
    """

    batches: tuple[AttentionBatch, ...]
    slot_mappings: tuple[torch.Tensor, ...]
    bad_tokens: torch.Tensor
    rows: torch.Tensor | None = None
    row_batches: tuple[AttentionBatch, ...] = ()
