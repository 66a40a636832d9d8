"""The choice among candidates, by attention's error on held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tightkv.calibration.candidates import DYNAMIC, PLAIN, Candidate, Method, candidates
from tightkv.calibration.places import Place
from tightkv.calibration.progress import Progress
from tightkv.calibration.statistics import LayerStatistics
from tightkv.calibration.trial import TrialError, try_formats
from tightkv.engine.observed_model import ObservedModel
from tightkv.formats import TensorPolicy, TensorScale
from tightkv.formats.registry import takes_scales
from tightkv.kernels import Backend
from tightkv.models import AttentionCall, LayerGeometry

__all__ = ["Choice", "Search"]

TensorId = tuple[int, str]
"""A layer, and "k" or "v"."""

# Text of another kind has values beyond those of the held-out text. A static scale is chosen as if
# they were so many times as large; measured on text of another kind, this picks better than the
# held-out error as it is (docs/calibration.md).
_UNSEEN = 1.25
_CLEARLY_BETTER = 0.8


@dataclass(frozen=True, slots=True)
class Choice:
    """What was taken for K or V of one layer, and what the alternatives would have cost.

    Attributes:
        policy: format and scale.
        candidate: how the scale was made.
        error: of the choice, on held-out text.
        plain_error: with one static scale for the whole tensor.
        dynamic_error: with dynamic scales per token and head alone.
    """

    policy: TensorPolicy
    candidate: Candidate
    error: TrialError
    plain_error: TrialError
    dynamic_error: TrialError


class Search:
    """Tries all candidates in every layer, K and V apart, and picks."""

    def __init__(
        self,
        method: Method,
        dtypes: Mapping[str, str],
        layers: Sequence[LayerGeometry],
        statistics: Mapping[int, LayerStatistics],
        backend: Backend,
    ) -> None:
        """Nothing is tried yet.

        Args:
            method: how scales are made.
            dtypes: format of "k" and of "v".
            layers: those that get scales.
            statistics: by layer.
            backend: kernels to try with.
        """
        self._method = method
        self._dtypes = {name: dtype for name, dtype in dtypes.items() if takes_scales(dtype)}
        self._layers = {layer.layer_idx: layer for layer in layers}
        self._statistics = statistics
        self._backend = backend
        self._errors: dict[tuple[TensorId, Candidate], TrialError] = {}
        self._tensors = [(layer, name) for layer in self._layers for name in self._dtypes]

    def run(
        self, model: ObservedModel, places: Sequence[Place], progress: Progress
    ) -> dict[TensorId, Choice]:
        """Try on held-out windows, choose, and measure what was chosen."""
        options = {name: candidates(self._method, name) for name in self._dtypes}
        unseen = _UNSEEN if self._method.static else 1.0
        self._try(
            {tensor: options[tensor[1]] for tensor in self._tensors},
            unseen,
            model,
            places,
            "trying scales",
            progress,
        )
        taken = self._choose(options)
        self._errors.clear()
        yardsticks = (PLAIN, DYNAMIC)
        self._try(
            {tensor: [candidate, *yardsticks] for tensor, candidate in taken.items()},
            1.0,
            model,
            places,
            "measuring the choice",
            progress,
        )
        return {
            tensor: Choice(
                self._policy(tensor, candidate),
                candidate,
                *(self._errors[tensor, one] for one in (candidate, *yardsticks)),
            )
            for tensor, candidate in taken.items()
        }

    def _try(
        self,
        options: Mapping[TensorId, Sequence[Candidate]],
        unseen: float,
        model: ObservedModel,
        places: Sequence[Place],
        stage: str,
        progress: Progress,
    ) -> None:
        """Add up the errors of all options over the windows."""

        def try_layer(call: AttentionCall, output: torch.Tensor) -> None:
            layer = self._layers.get(call.layer_idx)
            if layer is None:
                return
            for name in self._dtypes:
                tensor = (call.layer_idx, name)
                for candidate in dict.fromkeys(options[tensor]):
                    policy = self._policy(tensor, candidate, unseen)
                    error = try_formats(call, output, layer, self._backend, **{name: policy})
                    self._errors.setdefault((tensor, candidate), TrialError()).add(error)

        for done, place in enumerate(places, start=1):
            model.run(place.token_ids, place.positions, try_layer)
            progress(stage, done, len(places))

    def _choose(self, options: Mapping[str, Sequence[Candidate]]) -> dict[TensorId, Candidate]:
        own = {tensor: self._best(options[tensor[1]], [tensor]) for tensor in self._tensors}
        if self._method.static:
            return own
        # One way for K and one for V, since a layer alone would follow the noise, save where its
        # own is clearly better: layers with outliers.
        common = {
            name: self._best(options[name], [tensor for tensor in own if tensor[1] == name])
            for name in self._dtypes
        }
        return {
            tensor: best
            if self._relative(tensor, best)
            < _CLEARLY_BETTER * self._relative(tensor, common[tensor[1]])
            else common[tensor[1]]
            for tensor, best in own.items()
        }

    def _relative(self, tensor: TensorId, candidate: Candidate) -> float:
        return self._errors[tensor, candidate].relative

    def _best(self, options: Sequence[Candidate], tensors: Sequence[TensorId]) -> Candidate:
        """The candidate with the least error over these tensors."""

        def error(candidate: Candidate) -> float:
            return sum(self._relative(tensor, candidate) for tensor in tensors)

        return min(options, key=error)

    def _policy(self, tensor: TensorId, candidate: Candidate, unseen: float = 1.0) -> TensorPolicy:
        layer, name = tensor
        dtype = self._dtypes[name]
        scale = candidate.scale(self._statistics[layer], name, self._method, dtype)
        return TensorPolicy(dtype, TensorScale(scale.values / unseen, scale.dynamic))
