"""A model whose K has outliers, and whose output is the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel


def inject_outliers(model: PreTrainedModel, layers: Iterable[int], factor: float) -> None:
    """Multiply two channels of K by `factor`, and divide the same channels of its queries.

    RoPE turns channel i with channel i + size / 2, so both are scaled. Logits q·k stay as they are;
    what is stored does not. Takes transformers' own linear layers (Llama's names), in place.
    """
    decoder: Any = model.model
    with torch.no_grad():
        for layer in layers:
            attention = decoder.layers[layer].self_attn
            size = attention.head_dim
            group = attention.q_proj.out_features // attention.k_proj.out_features
            channels = torch.tensor([1, 1 + size // 2])  # of KV head 0
            _scale(attention.k_proj, channels, factor)
            for head in range(group):
                _scale(attention.q_proj, head * size + channels, 1 / factor)


def _scale(layer: Any, rows: torch.Tensor, factor: float) -> None:
    layer.weight[rows] *= factor
    if layer.bias is not None:
        layer.bias[rows] *= factor
