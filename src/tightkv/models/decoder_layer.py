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

from tightkv.kernels import AttentionParams, Backend, CpuBackend, DecoderLayerWeights
from tightkv.models.attention import AttentionCall, StepHandler, attend, current_handler
from tightkv.models.linear import JoinedPart, JoinedProduct, PackedLinear, cpu_backend

__all__ = ["FusedDecoderLayer", "fuse_decoder_layers", "fused_step_bytes", "runs_in_one_call"]

# Layers of transformers that are this one, and where their attention has its window.
_WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "LlamaDecoderLayer": lambda attention: None,
    "MistralDecoderLayer": lambda attention: attention.config.sliding_window,
    "Qwen2DecoderLayer": lambda attention: attention.sliding_window,
    "Qwen3DecoderLayer": lambda attention: attention.sliding_window,
}

_ACTIVATIONS = ("silu", "swish")


class FusedDecoderLayer(nn.Module):
    """Takes the place of a decoder layer of transformers whose linear layers are packed.

    Attributes:
        is_last: whether no layer comes after it; then a `StepHandler` may ask for some tokens only.
    """

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
        self.is_last = False
        self._weights = DecoderLayerWeights(
            qkv=(self._qkv.packed, self._qkv.bias),
            o_proj=(self._o_proj.packed, self._o_proj.bias),
            gate_up=(self._gate_up.packed, self._gate_up.bias),
            down_proj=(self._down_proj.packed, self._down_proj.bias),
            before_attention=_norm_of(self.input_layernorm),
            before_mlp=_norm_of(self.post_attention_layernorm),
            of_query=_norm_of(self._head_norms[0]),
            of_key=_norm_of(self._head_norms[1]),
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_size=self._head_size,
            params=self._params,
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **unused: object,
    ) -> Tensor:
        """`[1, num_tokens, hidden_size]` to the same, as transformers calls its layers.

        In one call where the handler of attention lets it, to the same bits.
        """
        hidden = hidden_states[0]
        cos, sin = (of_batch[0] for of_batch in position_embeddings)
        handler = current_handler()
        if isinstance(handler, StepHandler):
            step = handler.step_of(self._layer_idx, is_last=self.is_last)
            return self._backend.decoder_layer(self._weights, hidden, cos, sin, step)[None]
        qkv = self._qkv(self._norm_rows(self.input_layernorm, hidden))
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
        fused = [layer for layer in parent.children() if isinstance(layer, FusedDecoderLayer)]
        if fused and len(fused) == len(list(parent.children())):
            fused[-1].is_last = True


def runs_in_one_call(model: PreTrainedModel, backend: Backend) -> bool:
    """Whether each decoder layer of a model can be given a `StepHandler` over this backend."""
    layers = [module for module in model.modules() if isinstance(module, FusedDecoderLayer)]
    return (
        [layer for layer in layers if layer.is_last] == layers[-1:] != []
        and isinstance(backend, CpuBackend)
        and backend.isa == cpu_backend().isa
    )


def fused_step_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int | None:
    """Bytes of a step for each of its tokens, if the layers are fused, or will be; else None.

    These are the buffers of csrc/decoder_layer.cpp, which all layers share and which stay, the
    hidden states, and cosine and sine of the positions.

    Args:
        model: as TightKV runs it, or transformers' own, also on the meta device.
        dtype: of its weights when it is served.
    """
    return max((_step_bytes(x) for x in model.modules() if _is_fused(x, dtype)), default=None)


def _is_fused(layer: Any, dtype: torch.dtype) -> bool:
    return isinstance(layer, FusedDecoderLayer) or (
        dtype == torch.float32
        and type(layer).__name__ in _WINDOWS
        and layer.self_attn.config.hidden_act in _ACTIVATIONS
    )


def _step_bytes(layer: Any) -> int:
    attention, down_proj = layer.self_attn, layer.mlp.down_proj
    inner, hidden = down_proj.in_features, down_proj.out_features
    query, key = attention.q_proj.out_features, attention.k_proj.out_features
    narrow = max(hidden, query, inner)
    wide = max(query + 2 * key, 2 * inner)
    values = narrow + wide + hidden + hidden + 2 * attention.head_dim
    return int(values) * torch.float32.itemsize


def _norm_of(norm: Any) -> tuple[Tensor, float] | None:
    return None if norm is None else (norm.weight, norm.variance_epsilon)


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
        and attention.config.hidden_act in _ACTIVATIONS
    )
