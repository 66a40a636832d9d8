"""Shapes of each attention layer, learned from one short run of the model.

Head sizes, KV heads and windows can differ by layer, and no config says so in one way.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tightkv.errors import TightKVError, UnsupportedModelError
from tightkv.models.attention import AttentionCall, attend_with, use_paged_attention
from tightkv.models.compatibility import one_line, quiet_transformers

__all__ = [
    "LayerGeometry",
    "ModelGeometry",
    "geometry_without_weights",
    "probe_geometry",
    "stand_in",
]


_logger = logging.getLogger("tightkv")


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """Shapes of one attention layer that stores K and V of its own."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    sliding_window: int | None


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Shapes of all attention layers.

    Attributes:
        layers: layers that store K and V, in order.
        kv_sources: layers that read another layer's K and V, and which.
    """

    layers: tuple[LayerGeometry, ...]
    kv_sources: dict[int, int]


def stand_in(call: AttentionCall) -> torch.Tensor:
    """A tensor of the shape of attention's output, for runs whose numbers nobody reads."""
    return call.value.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)


class _Probe:
    """Attention handler that notes shapes."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerGeometry] = {}
        self.kv_sources: dict[int, int] = {}
        self._keys: dict[int, torch.Tensor] = {}

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        if call.layer_idx in self._keys:
            raise UnsupportedModelError(
                f"Layer {call.layer_idx} calls attention twice in one step, which the paged cache "
                "cannot tell apart: use a model that calls it once per layer."
            )
        self._keys[call.layer_idx] = call.key_source
        source = next((i for i, k in self._keys.items() if k is call.key_source), call.layer_idx)
        if source != call.layer_idx:
            self.kv_sources[call.layer_idx] = source
        else:
            self.layers[call.layer_idx] = _geometry(call)
        return stand_in(call)


def probe_geometry(model: PreTrainedModel) -> ModelGeometry:
    """Run two tokens through a model made ready by `use_paged_attention`, and note all shapes.

    Raises:
        UnsupportedModelError: if the model has no attention layer, or uses one in a way that the
            cache cannot serve.
    """
    probe = _Probe()
    try:
        num_rows = _run(model, probe)
    except TightKVError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be run on packed tokens ({one_line(error)}): use a "
            "model with full or sliding-window attention."
        ) from error
    if num_rows != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} gives {num_rows} rows of logits where one was asked for: it "
            "must take logits_to_keep."
        )
    if not probe.layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} never called attention: it has no K and V to cache."
        )
    layers = tuple(probe.layers[layer] for layer in sorted(probe.layers))
    _check_windows(model.config, layers)
    return ModelGeometry(layers, probe.kv_sources)


def geometry_without_weights(config: PreTrainedConfig) -> ModelGeometry | None:
    """All shapes from the config alone; None where the model's code cannot run without weights."""
    untyped: Any = AutoModelForCausalLM
    try:
        with quiet_transformers(), torch.device("meta"):
            model = untyped.from_config(
                copy.deepcopy(config), dtype=torch.bfloat16, attn_implementation="eager"
            )
            use_paged_attention(model)
            return probe_geometry(model)
    except Exception as error:  # whatever the code of a hundred architectures stumbles over
        _logger.debug("no shapes without weights: %s", one_line(error))
        return None


def _run(model: PreTrainedModel, probe: _Probe) -> int:
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    with torch.inference_mode(), attend_with(probe):
        output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    return int(output.logits.shape[1])


def _check_windows(config: PreTrainedConfig, layers: tuple[LayerGeometry, ...]) -> None:
    """Some models put the window into the mask alone, which is not made here."""
    kinds = getattr(config, "layer_types", None)  # not every config has the field
    window = getattr(config, "sliding_window", None)
    if kinds:
        lost = [
            layer.layer_idx
            for layer in layers
            if kinds[layer.layer_idx] == "sliding_attention" and layer.sliding_window is None
        ]
    else:
        is_used = window and window < getattr(config, "max_position_embeddings", 0)
        has_window = any(layer.sliding_window for layer in layers)
        lost = [layer.layer_idx for layer in layers] if is_used and not has_window else []
    if lost:
        raise UnsupportedModelError(
            f"Models of type {config.model_type!r} do not tell attention the window of layers "
            f"{lost} ({window} tokens), which would be ignored: use a model without a window."
        )


def _geometry(call: AttentionCall) -> LayerGeometry:
    num_heads, num_kv_heads = call.query.shape[1], call.key.shape[1]
    if num_heads % num_kv_heads or call.query.shape[2] != call.key.shape[2]:
        raise UnsupportedModelError(
            f"Layer {call.layer_idx} has {num_heads} query heads of size {call.query.shape[2]} and "
            f"{num_kv_heads} KV heads of size {call.key.shape[2]}: the first number must be a "
            "multiple of the third, and the sizes must be equal."
        )
    return LayerGeometry(
        layer_idx=call.layer_idx,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=call.key.shape[2],
        value_size=call.value.shape[2],
        sliding_window=call.params.sliding_window,
    )
