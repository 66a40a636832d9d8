"""Memory of intermediate results, measured on a short run."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from tightkv.models.attention import attend_with
from tightkv.models.decoder_layer import fused_step_bytes
from tightkv.models.geometry import stand_in
from tightkv.models.loader import LoadedModel

__all__ = ["activation_bytes_per_token", "logits_bytes", "peak_activation_bytes"]

_SAMPLE_TOKENS = 32


class _Meter(TorchDispatchMode):
    """Adds up the bytes of tensors made inside, until they die; a storage counts once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes = 0
        self._tensors_of: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        # Not the data's address, which is 0 on the meta device.
        address, num_bytes = storage._cdata, storage.nbytes()
        if self._tensors_of[address] == 0:
            self._live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        self._tensors_of[address] += 1
        weakref.finalize(tensor, self._release, address, num_bytes)

    def _release(self, address: int, num_bytes: int) -> None:
        self._tensors_of[address] -= 1
        if self._tensors_of[address] == 0:
            self._live_bytes -= num_bytes


def peak_activation_bytes(
    model: LoadedModel, num_tokens: int, num_sampled: int, num_prompt_rows: int
) -> int:
    """Bytes that the engine's steps need at their peak.

    Args:
        model: as it is served.
        num_tokens: most tokens of a step.
        num_sampled: most tokens that are sampled in a step.
        num_prompt_rows: most rows of logits besides.
    """
    fused = fused_step_bytes(model.model, model.dtype)
    of_token = activation_bytes_per_token(model.model) if fused is None else fused
    logits = logits_bytes(model.vocab_size, model.dtype, num_sampled, num_prompt_rows)
    return int(of_token * num_tokens) + logits


def logits_bytes(
    vocab_size: int, dtype: torch.dtype, num_sampled: int, num_prompt_rows: int
) -> int:
    """Bytes of a step's logits: as the model makes them, in float32, and the sampled ones again."""
    of_row = 4 if dtype == torch.float32 else dtype.itemsize + 4
    return vocab_size * ((num_sampled + num_prompt_rows) * of_row + num_sampled * 4)


def activation_bytes_per_token(model: PreTrainedModel) -> float:
    """Bytes of a step's largest intermediate results, for each of its tokens.

    Measured on 32 tokens: every intermediate result is proportional to the tokens. The model may
    lie on the meta device, where nothing is computed.
    """
    meter = _Meter()
    ids = torch.zeros(1, _SAMPLE_TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(_SAMPLE_TOKENS, device=ids.device)[None]
    with torch.inference_mode(), attend_with(stand_in), meter:
        model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    return meter.peak_bytes / _SAMPLE_TOKENS
