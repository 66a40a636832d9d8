"""The decoder layer that most models share, in few passes over memory.

RMSNorm, attention with RoPE, gated MLP with SiLU: Llama's layer, and with a bias or a norm of
queries and keys that of Mistral, Qwen2 and Qwen3. With few tokens in a step, transformers' own
modules spend a third of it between the products, in many small operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tightkv.kernels import AttentionParams, CpuBackend
from tightkv.models.attention import AttentionCall, attend
from tightkv.models.linear import JoinedPart, JoinedProduct, PackedLinear, cpu_backend

__all__ = ["FusedDecoderLayer", "fuse_decoder_layers"]

# Layers of transformers that are this one, and where their attention has its window.
_WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "LlamaDecoderLayer": lambda attention: None,
    "MistralDecoderLayer": lambda attention: attention.config.sliding_window,
    "Qwen2DecoderLayer": lambda attention: attention.sliding_window,
    "Qwen3DecoderLayer": lambda attention: attention.sliding_window,
}


class FusedDecoderLayer(nn.Module):
    """Takes the place of a decoder layer of transformers whose linear layers are packed."""

    def __init__(self, layer: Any, backend: CpuBackend) -> None:
        super().__init__()
        # Under transformers' names, for whoever looks for a layer or counts the weights.
        self.self_attn = layer.self_attn
        self.mlp = layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        attention: Any = layer.self_attn
        self._backend = backend
        self._layer_idx: int = attention.layer_idx
        self._params = AttentionParams(
            softmax_scale=attention.scaling,
            sliding_window=_WINDOWS[type(layer).__name__](attention),
        )
        self._head_size: int = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_size
        self._num_kv_heads = attention.k_proj.out_features // self._head_size
        self._qkv: JoinedProduct = attention.q_proj.product
        self._gate_up: JoinedProduct = layer.mlp.gate_proj.product
        self._o_proj: PackedLinear = attention.o_proj
        self._down_proj: PackedLinear = layer.mlp.down_proj
        self._head_norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **unused: object,
    ) -> Tensor:
        """`[1, num_tokens, hidden_size]` to the same, as transformers calls its layers."""
        hidden = hidden_states[0]
        qkv = self._qkv(self._norm_rows(self.input_layernorm, hidden))
        cos, sin = (of_batch[0] for of_batch in position_embeddings)
        hidden = self._o_proj.add_to(hidden, self._attend(qkv, cos, sin))
        gate_up = self._gate_up(self._norm_rows(self.post_attention_layernorm, hidden))
        return self._down_proj.add_to(hidden, self._backend.silu_and_mul(gate_up))[None]

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[num_tokens, (num_heads + 2 num_kv_heads) head_size]` to attention's output."""
        heads = qkv.view(len(qkv), -1, self._head_size)
        query, key, value = heads.split_with_sizes(
            (self._num_heads, self._num_kv_heads, self._num_kv_heads), dim=1
        )
        query_norm, key_norm = self._head_norms
        if query_norm is not None:  # Qwen3
            query, key = self._norm(query_norm, query), self._norm(key_norm, key)
        for rotated in (query, key):
            self._backend.rotate(rotated, cos, sin)
        call = AttentionCall(self._layer_idx, query, key, value, self._params, key)
        return attend(call).reshape(len(qkv), -1)

    def _norm_rows(self, norm: Any, rows: Tensor) -> Tensor:
        return self._norm(norm, rows[:, None])[:, 0]

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        return self._backend.rms_norm(x, norm.weight, norm.variance_epsilon)


def fuse_decoder_layers(model: PreTrainedModel) -> None:
    """Replace the decoder layers of the shared kind whose products are packed, in place.

    The model then runs inside `attend_with` only. Other layers stay transformers' own.
    """
    backend = cpu_backend()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_shared_kind(child):
                setattr(parent, name, FusedDecoderLayer(child, backend))


def _is_shared_kind(layer: Any) -> bool:
    kind = type(layer)
    if kind.__name__ not in _WINDOWS or not kind.__module__.startswith("transformers.models."):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    joined = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
    packed = (attention.o_proj, mlp.down_proj)
    return (
        all(isinstance(child, JoinedPart) for child in joined)
        and all(isinstance(child, PackedLinear) for child in packed)
        and layer.input_layernorm.weight.dtype == torch.float32
        and attention.config.hidden_act in ("silu", "swish")
    )
