"""Runs the model on a batch: knows weights, cache and kernels, and no policy."""

from __future__ import annotations

import torch

from tightkv.engine.batch import ForwardBatch
from tightkv.kvcache import AttentionMetadata, KVCacheStorage
from tightkv.models import AttentionCall, LoadedModel, attend_with

__all__ = ["ModelRunner"]


class PagedAttention:
    """What attention does while serving: write this step's K and V, then attend over the cache."""

    def __init__(self, storage: KVCacheStorage, metadata: AttentionMetadata) -> None:
        self._storage = storage
        self._metadata = metadata

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        self._storage.write(call.layer_idx, call.key, call.value, self._metadata)
        return self._storage.attend(call.layer_idx, call.query, self._metadata, call.params)


class ModelRunner:
    """A model bound to a cache. Several runners may share one model."""

    def __init__(self, model: LoadedModel, storage: KVCacheStorage) -> None:
        self.model = model
        self.storage = storage

    @torch.inference_mode()
    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        """One forward pass, packed.

        Returns:
            float32 logits `[num_rows, vocab_size]` of the batch's `logit_rows`. Tokens with a NaN
            or Inf in K or V are marked in the batch's `metadata.bad_tokens`.
        """
        num_rows = len(batch.logit_rows)
        # A model cannot make no logits at all: a step without rows makes one that nobody reads.
        rows = batch.logit_rows if num_rows else batch.logit_rows.new_zeros(1)
        with attend_with(PagedAttention(self.storage, batch.metadata)):
            output = self.model.model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        logits: torch.Tensor = output.logits[0, :num_rows]
        return logits.float()
