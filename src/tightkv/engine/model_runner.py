"""Runs the model on a batch: knows weights, cache and kernels, and no policy."""

from __future__ import annotations

import torch

from tightkv.engine.batch import ForwardBatch
from tightkv.engine.graphs import DecodeGraphs
from tightkv.kernels import LayerStep
from tightkv.kvcache import AttentionMetadata, KVCacheStorage
from tightkv.models import AttentionCall, LoadedModel, StepHandler, attend_with, runs_in_one_call

__all__ = ["ModelRunner"]


class PagedAttention:
    """What attention does while serving: write this step's K and V, then attend over the cache."""

    def __init__(self, storage: KVCacheStorage, metadata: AttentionMetadata) -> None:
        self._storage = storage
        self._metadata = metadata

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        self._storage.write(call.layer_idx, call.key, call.value, self._metadata)
        return self._storage.attend(call.layer_idx, call.query, self._metadata, call.params)


class PagedSteps(PagedAttention, StepHandler):
    """The same, with layers that run in one call; only rows of logits come out of the last."""

    def step_of(self, layer_idx: int, *, is_last: bool) -> LayerStep:
        return self._storage.step_of(layer_idx, self._metadata, rows_only=is_last)


class ModelRunner:
    """A model bound to a cache. Several runners may share one model."""

    def __init__(self, model: LoadedModel, storage: KVCacheStorage) -> None:
        self.model = model
        self.storage = storage
        self.graphs: DecodeGraphs | None = None
        self._has_steps = runs_in_one_call(model.model, storage.backend)

    @torch.inference_mode()
    def execute(self, batch: ForwardBatch) -> torch.Tensor:
        """One forward pass, packed.

        Returns:
            float32 logits `[num_rows, vocab_size]` of the batch's `logit_rows`. Tokens with a NaN
            or Inf in K or V are marked in the batch's `metadata.bad_tokens`.
        """
        self.storage.count_written(sum(chunk.num_tokens for chunk in batch.chunks))
        num_rows = len(batch.logit_rows)
        if self.graphs is not None and batch.bucket:
            return self.graphs.replay(batch.bucket)[:num_rows]
        return self.forward(batch)[:num_rows].float()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits as the model makes them, perhaps of more rows than were asked for."""
        rows: int | torch.Tensor = 0  # all that come out of the last layer
        handler = (PagedSteps if self._has_steps else PagedAttention)(self.storage, batch.metadata)
        if not self._has_steps and batch.metadata.rows is not None:
            # Transformers cannot make no logits at all: one more, which nobody reads.
            rows = batch.logit_rows if len(batch.logit_rows) else batch.logit_rows.new_zeros(1)
        with attend_with(handler):
            output = self.model.model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        logits: torch.Tensor = output.logits[0]
        return logits
