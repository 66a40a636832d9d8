"""The error that matters: of attention's output, through the kernels that serve."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightkv.engine.observed_model import EXACT, window_metadata, window_spec
from tightkv.formats import LayerScales, TensorPolicy
from tightkv.kernels import Backend
from tightkv.kvcache import KVCacheStorage, group_layers
from tightkv.models import AttentionCall, LayerGeometry

__all__ = ["TrialError", "try_formats"]


@dataclass(slots=True)
class TrialError:
    """Sums over windows.

    Attributes:
        squared_error: of attention's output against that of the unquantized cache.
        squared_output: of the latter.
        clipped: values that were clipped.
        written: values that were written.
    """

    squared_error: float = 0.0
    squared_output: float = 0.0
    clipped: int = 0
    written: int = 0

    @property
    def relative(self) -> float:
        """The squared error as a share of the squared output."""
        return self.squared_error / self.squared_output if self.squared_output else 0.0

    @property
    def clip_rate(self) -> float:
        return self.clipped / self.written if self.written else 0.0

    def add(self, other: TrialError) -> None:
        self.squared_error += other.squared_error
        self.squared_output += other.squared_output
        self.clipped += other.clipped
        self.written += other.written


def try_formats(
    call: AttentionCall,
    output: torch.Tensor,
    layer: LayerGeometry,
    backend: Backend,
    k: TensorPolicy = EXACT,
    v: TensorPolicy = EXACT,
) -> TrialError:
    """Attention of one window with K and V stored as the policies say.

    Args:
        call: the window.
        output: its attention with an unquantized cache.
        layer: shapes of the layer.
        backend: kernels to use.
        k: how to store K; the clips counted are those of what is not exact.
        v: how to store V.
    """
    num_tokens, device = len(call.query), call.query.device
    spec = window_spec(layer, k, v)
    storage = KVCacheStorage(
        group_layers([spec]),
        -(-num_tokens // spec.block_size),
        device,
        backend,
        {layer.layer_idx: LayerScales(k.scale, v.scale)},
    )
    metadata = window_metadata(num_tokens, 1, device)
    storage.write(layer.layer_idx, call.key, call.value, metadata)
    approximate = storage.attend(layer.layer_idx, call.query, metadata, call.params)
    clipped = sum(storage.clip_counts()[layer.layer_idx])
    exact = output.double()
    written = [x.numel() for x, policy in ((call.key, k), (call.value, v)) if policy is not EXACT]
    return TrialError(
        float(((approximate.double() - exact) ** 2).sum()),
        float((exact**2).sum()),
        clipped,
        sum(written),
    )
