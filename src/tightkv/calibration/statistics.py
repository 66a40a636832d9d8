"""What K and V are like: magnitudes by layer, KV head and channel, gathered in one pass.

Memory does not grow with the text. The first tokens of a sequence (attention sinks, whose K is
unlike that of all others; arXiv:2309.17453) are kept apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tightkv.calibration.places import Place
from tightkv.calibration.progress import Progress
from tightkv.engine.observed_model import ObservedModel
from tightkv.models import AttentionCall

__all__ = ["LayerStatistics", "TensorStatistics", "gather_statistics"]

NUM_SINKS = 4
_BINS_PER_OCTAVE = 8
_LOWEST, _HIGHEST = -16, 16  # octaves
_NUM_BINS = (_HIGHEST - _LOWEST) * _BINS_PER_OCTAVE


class TensorStatistics:
    """K or V of one layer.

    Attributes:
        absmax: largest magnitude of all but the first tokens, `[num_kv_heads, size]`.
        sink_absmax: of the first tokens.
        histogram: int64 `[num_kv_heads, size, bins]` of log2 of the magnitudes, sinks left out;
            8 bins per octave from 2^-16 to 2^16, the outer ones open.
    """

    def __init__(self, num_kv_heads: int, size: int) -> None:
        self.absmax = torch.zeros(num_kv_heads, size)
        self.sink_absmax = torch.zeros(num_kv_heads, size)
        self.histogram = torch.zeros(num_kv_heads, size, _NUM_BINS, dtype=torch.int64)

    @property
    def range(self) -> torch.Tensor:
        """Largest magnitude by channel, sinks included."""
        return torch.maximum(self.absmax, self.sink_absmax)

    @property
    def outlier_ratio(self) -> float:
        """The loudest channel over the median channel, of the head where that is most."""
        median = self.range.median(dim=-1).values
        loudest = self.range.amax(dim=-1)
        return float((loudest / torch.where(median > 0, median, loudest.clamp_min(1e-30))).max())

    def add(self, x: torch.Tensor, is_at_start: bool = True) -> None:
        """Count one window `[num_tokens, num_kv_heads, size]`.

        Sinks stand at the first positions when served; elsewhere they are left out.
        """
        magnitude = x.float().abs().cpu()
        sinks, rest = magnitude[:NUM_SINKS], magnitude[NUM_SINKS:]
        if is_at_start:
            self.sink_absmax = torch.maximum(self.sink_absmax, sinks.amax(dim=0))
        if not len(rest):
            return
        self.absmax = torch.maximum(self.absmax, rest.amax(dim=0))
        octave = torch.log2(rest) - _LOWEST  # -inf for 0, which is the lowest bin
        bins = (octave * _BINS_PER_OCTAVE).clamp(0, _NUM_BINS - 1).long()
        channel = torch.arange(self.absmax.numel()).view(self.absmax.shape)
        counts = torch.bincount(
            (channel * _NUM_BINS + bins).flatten(), minlength=self.histogram.numel()
        )
        self.histogram += counts.view(self.histogram.shape)

    def percentile(self, share: float) -> torch.Tensor:
        """Magnitude below which `share` of a channel's values lie, `[num_kv_heads, size]`.

        Read off the histogram, so up to a bin (9 %) too large, and never above the largest.
        """
        counts = self.histogram.double().cumsum(dim=-1)
        total = counts[..., -1:]
        bins = (counts < share * total).sum(dim=-1)
        upper = torch.exp2((bins + 1).float() / _BINS_PER_OCTAVE + _LOWEST)
        return torch.minimum(upper, self.absmax)


class LayerStatistics:
    """One layer.

    Attributes:
        query_rms: root of the mean of q² of the queries that share a KV head, by channel,
            `[num_kv_heads, head_size]`: how much an error of a channel of K counts.
    """

    def __init__(self, num_kv_heads: int, head_size: int, value_size: int) -> None:
        self.k = TensorStatistics(num_kv_heads, head_size)
        self.v = TensorStatistics(num_kv_heads, value_size)
        self._query_sum = torch.zeros(num_kv_heads, head_size, dtype=torch.float64)
        self._num_queries = 0

    @property
    def query_rms(self) -> torch.Tensor:
        return (self._query_sum / max(1, self._num_queries)).sqrt().float()

    def add(self, call: AttentionCall, is_at_start: bool = True) -> None:
        """Count one window."""
        self.k.add(call.key, is_at_start)
        self.v.add(call.value, is_at_start)
        num_kv_heads, head_size = call.key.shape[1:]
        queries = call.query.double().cpu().view(len(call.query), num_kv_heads, -1, head_size)
        self._query_sum += (queries**2).sum(dim=(0, 2))
        self._num_queries += queries.shape[0] * queries.shape[2]


def gather_statistics(
    model: ObservedModel, places: Sequence[Place], progress: Progress
) -> dict[int, LayerStatistics]:
    """Statistics of every layer that stores K and V of its own, over all windows."""
    found: dict[int, LayerStatistics] = {}
    for done, place in enumerate(places, start=1):

        def note(call: AttentionCall, _: torch.Tensor, first: int = place.first_position) -> None:
            if call.layer_idx not in found:
                num_kv_heads, head_size = call.key.shape[1:]
                value_size = call.value.shape[2]
                found[call.layer_idx] = LayerStatistics(num_kv_heads, head_size, value_size)
            found[call.layer_idx].add(call, is_at_start=first == 0)

        model.run(place.token_ids, place.positions, note)
        progress("measuring K and V", done, len(places))
    return found
