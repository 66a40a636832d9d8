"""What a plan must know of a model; nothing of it needs weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LatentCache", "ModelFacts", "Parameter"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight: its name in the model, and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Whether a token meets only some of it (mixture of experts)."""
        return ".experts." in self.name


@dataclass(frozen=True, slots=True)
class LatentCache:
    """Multi-head latent attention: K and V of all heads, made from one small vector per token.

    Attributes:
        size: values per token and layer: the latent and the rotary key.
        num_layers: layers that have one.
    """

    size: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model, from its config and the sizes of its files.

    Attributes:
        num_layers: attention layers, those that store nothing of their own too.
        num_shared_layers: those that read another layer's K and V.
        num_heads: query heads, of the layers with the most.
        num_kv_heads: KV heads of the same.
        head_size: channels of K; 0 where layers differ.
        value_size: channels of V; 0 where layers differ.
        kv_values: of K and V per token, in all layers that store them.
        max_position: longest sequence that it knows.
        dtype: of its weights and intermediate results when it is served.
        dtype_bytes: of one such value.
        parameters: all weights, shared ones once.
        weight_bytes: bytes of the weights as they are served, low, best and high.
        weight_source: where that is from: "files", "given", "config", "quantization".
        activation_bytes: bytes of intermediate results per token of a step, on one device.
        hidden_bytes: bytes of one token's hidden state.
        num_experts: experts of a layer, 1 where there are none.
        experts_per_token: how many a token meets.
        latent: of a model with latent attention.
        not_served: why TightKV itself refuses the model, or None.
        parts: names of the parts of a multimodal model that are not counted.
    """

    name: str
    model_type: str
    num_layers: int
    num_shared_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    kv_values: int
    max_position: int
    vocab_size: int
    dtype: str
    dtype_bytes: int
    parameters: tuple[Parameter, ...]
    weight_bytes: tuple[int, int, int]
    weight_source: str
    activation_bytes: float
    hidden_bytes: int
    num_experts: int = 1
    experts_per_token: int = 1
    latent: LatentCache | None = None
    not_served: str | None = None
    parts: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    def touched_experts(self, num_tokens: float) -> float:
        """Share of the experts that a step of `num_tokens` tokens reads, if they are drawn evenly.

        `1 - (1 - k / n)^tokens` for k of n experts per token.
        """
        untouched: float = (1.0 - self.experts_per_token / self.num_experts) ** num_tokens
        return 1.0 - untouched
