"""What each layer's formats do by themselves: error of its attention, and clipped values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tightkv.calibration.progress import Progress
from tightkv.calibration.trial import try_formats
from tightkv.engine.observed_model import ObservedModel
from tightkv.evaluation.arms import Arm, Arms
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.report import LayerFigures
from tightkv.models import AttentionCall, LayerGeometry, ModelGeometry, prepare_model

__all__ = ["measure_layers"]

_MAX_WINDOWS, _MAX_TOKENS = 2, 512
_STAGE = "layers"


def measure_layers(
    arms: Arms, windows: Sequence[Sequence[int]], journal: Journal, progress: Progress
) -> dict[str, tuple[LayerFigures, ...]]:
    """Try each arm's formats in one layer after the other.

    Each layer is given what it gets with K and V in float32, so that its error is its own. Of the
    text the first two windows are taken, and of each the first 512 tokens.

    Args:
        arms: whose policies are tried.
        windows: token ids.
        journal: for what is measured.
        progress: told how far it is.

    Returns:
        By arm, the layers that store K and V.
    """
    windows = [window[:_MAX_TOKENS] for window in windows[:_MAX_WINDOWS]]
    geometry = prepare_model(arms.base.engine.model.model)
    layers = geometry.layers
    total = len(windows) * len(layers)
    model = _observed_model(arms.base, geometry, max(map(len, windows), default=1))
    records = []
    for index, window in enumerate(windows):
        done = index * len(layers)
        on_layer = partial(_tell, progress, done, total)
        measure = partial(_measure, arms, model, layers, window, on_layer)
        records.append(journal.once(f"layers/{index}", measure))
        progress(_STAGE, done + len(layers), total)
    return {arm.name: _figures([record[arm.name] for record in records]) for arm in arms.others}


def _observed_model(base: Arm, geometry: ModelGeometry, max_tokens: int) -> ObservedModel:
    engine = base.engine
    return ObservedModel(engine.model, geometry, engine.storage.backend, engine.device, max_tokens)


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    progress(_STAGE, before + done, total)


def _measure(
    arms: Arms,
    model: ObservedModel,
    layers: Sequence[LayerGeometry],
    window: Sequence[int],
    on_layer: Callable[[int], None],
) -> dict[str, dict[str, dict[str, float]]]:
    """By arm and layer, what one window adds to the sums."""
    shapes = {layer.layer_idx: layer for layer in layers}
    found: dict[str, dict[str, dict[str, float]]] = {arm.name: {} for arm in arms.others}
    num_seen = 0

    def try_layer(call: AttentionCall, output: torch.Tensor) -> None:
        nonlocal num_seen
        layer = shapes[call.layer_idx]
        for arm in arms.others:
            found[arm.name][str(layer.layer_idx)] = _try(arm, call, output, layer)
        num_seen += 1
        on_layer(num_seen)

    model.run(window, torch.arange(len(window)), try_layer)
    return found


def _try(
    arm: Arm, call: AttentionCall, output: torch.Tensor, layer: LayerGeometry
) -> dict[str, float]:
    policy, backend = arm.engine.policy[layer.layer_idx], arm.engine.storage.backend
    both = try_formats(call, output, layer, backend, k=policy.k, v=policy.v)
    # A trial counts the clips of K and V together.
    of_k = both.clipped and try_formats(call, output, layer, backend, k=policy.k).clipped
    return {
        "squared_error": both.squared_error,
        "squared_output": both.squared_output,
        "k_clipped": of_k,
        "k_written": call.key.numel(),
        "v_clipped": both.clipped - of_k,
        "v_written": call.value.numel(),
    }


def _figures(windows: Sequence[dict[str, Any]]) -> tuple[LayerFigures, ...]:
    """Of the sums over all windows."""

    def share(layer: str, part: str, of: str) -> float:
        whole = sum(window[layer][of] for window in windows)
        return sum(window[layer][part] for window in windows) / whole if whole else 0.0

    return tuple(
        LayerFigures(
            layer_idx=int(layer),
            k_clip_rate=share(layer, "k_clipped", "k_written"),
            v_clip_rate=share(layer, "v_clipped", "v_written"),
            attention_error=share(layer, "squared_error", "squared_output"),
        )
        for layer in windows[0]
    )
