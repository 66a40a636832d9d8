"""What attention needs to know of a step, besides tensors of the layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionMetadata"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Positions of a step's tokens in sequences and in the cache.

    Attributes:
        query_start_loc: int32 `[num_seqs + 1]`, exclusive prefix sum of the query lengths.
        seq_lens: int32 `[num_seqs]`, tokens in the cache when this step's are written.
        block_tables: per layer group, int32 `[num_seqs, max_blocks]`.
        slot_mappings: per layer group, int64 `[num_tokens]`.
        bad_tokens: bool `[num_tokens]`, set by any layer that met a NaN or Inf in K or V.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]
    bad_tokens: torch.Tensor
