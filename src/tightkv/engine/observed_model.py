"""A model over an unquantized cache, its K and V seen by an observer: for probe and calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tightkv.engine.model_runner import PagedAttention
from tightkv.engine.resolve import layer_spec
from tightkv.formats import LayerPolicy, TensorPolicy
from tightkv.kernels import AttentionBatch, Backend
from tightkv.kvcache import AttentionMetadata, KVCacheSpec, KVCacheStorage, group_layers
from tightkv.models import AttentionCall, LayerGeometry, LoadedModel, ModelGeometry, attend_with

__all__ = ["EXACT", "AttentionObserver", "ObservedModel", "window_metadata", "window_spec"]

AttentionObserver = Callable[[AttentionCall, torch.Tensor], None]
"""Is given a layer's call and its output `[num_tokens, num_heads, value_size]`."""

_BLOCK_SIZE = 16

EXACT = TensorPolicy("float32")
"""K or V as the model makes it."""


class ObservedModel:
    """Runs windows of tokens through the kernels that serve, with K and V in float32."""

    def __init__(
        self,
        model: LoadedModel,
        geometry: ModelGeometry,
        backend: Backend,
        device: torch.device,
        max_tokens: int,
    ) -> None:
        """Allocate a cache of `max_tokens`, the longest window."""
        specs = [window_spec(layer, EXACT, EXACT) for layer in geometry.layers]
        self._model = model
        self._device = device
        self._storage = KVCacheStorage(
            group_layers(specs),
            -(-max_tokens // _BLOCK_SIZE),
            device,
            backend,
            kv_sources=geometry.kv_sources,
        )
        self._stored = {layer.layer_idx for layer in geometry.layers}

    @torch.inference_mode()
    def run(
        self, token_ids: Sequence[int], positions: torch.Tensor, observer: AttentionObserver
    ) -> None:
        """Read one window; the observer sees each layer that stores K and V of its own.

        Args:
            token_ids: the window.
            positions: int64 `[num_tokens]`, where the tokens stand. With RoPE attention only
                depends on their differences, but what is stored of K depends on themselves.
            observer: told of each layer.
        """
        metadata = window_metadata(len(token_ids), len(self._storage.groups), self._device)
        attention = PagedAttention(self._storage, metadata)

        def attend(call: AttentionCall) -> torch.Tensor:
            output = attention(call)
            if call.layer_idx in self._stored:
                observer(call, output)
            return output

        with attend_with(attend):
            self._model.model(
                input_ids=torch.tensor(token_ids, device=self._device)[None],
                position_ids=positions.to(self._device)[None],
                use_cache=False,
                logits_to_keep=1,
            )


def window_spec(layer: LayerGeometry, k: TensorPolicy, v: TensorPolicy) -> KVCacheSpec:
    """The cache of a layer for one window."""
    return layer_spec(layer, LayerPolicy(k, v), _BLOCK_SIZE, torch.float32)


def window_metadata(num_tokens: int, num_groups: int, device: torch.device) -> AttentionMetadata:
    """One sequence, all of it new, in the first blocks of the cache."""
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    batch = AttentionBatch(
        torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        torch.tensor([num_tokens], dtype=torch.int32, device=device),
        torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
    )
    return AttentionMetadata(
        batches=(batch,) * num_groups,
        slot_mappings=(torch.arange(num_tokens, device=device),) * num_groups,
        bad_tokens=torch.zeros(num_tokens, dtype=torch.bool, device=device),
    )
