"""Weights in the order in which the C++ kernels read them."""

from __future__ import annotations

import torch

# After torch, so that both share torch's OpenMP runtime and its threads.
from tightkv.errors import KernelError
from tightkv.formats.registry import dtype_name
from tightkv.kernels import _native
from tightkv.kernels.arguments import AttentionParams, check_tensor

__all__ = ["WEIGHT_DTYPES", "DecoderLayerWeights", "Norm", "Product", "WeightPanels"]

_LANES = 16

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the weights of a packed linear layer may be."""


class WeightPanels:
    """The weight of a linear layer in the order in which it is multiplied.

    Attributes:
        panels: `[out_features / 16, rounded up, in_features, 16]`. A float32 weight whose values
            all have an exact bfloat16 or float16 (a checkpoint of that type) is kept as such: half
            the bytes, and the same products.
        code: its type's name.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        narrow = _without_loss(weight.detach())
        padded = torch.nn.functional.pad(narrow, (0, 0, 0, -self.out_features % _LANES))
        panels = padded.view(-1, _LANES, self.in_features).transpose(1, 2)
        self.panels = panels.contiguous()
        self.code = dtype_name(narrow.dtype)


Product = tuple[WeightPanels, torch.Tensor | None]
"""Weight and float32 bias of a linear layer."""

Norm = tuple[torch.Tensor, float] | None
"""Weight, float32, and epsilon of a norm."""


class DecoderLayerWeights:
    """A decoder layer with RMSNorm, RoPE and a gated MLP with SiLU, as the kernel wants it.

    Attributes:
        hidden_size: channels of a token between layers.
        head_size: channels of a head, of V too.
    """

    def __init__(
        self,
        *,
        qkv: Product,
        o_proj: Product,
        gate_up: Product,
        down_proj: Product,
        before_attention: Norm,
        before_mlp: Norm,
        of_query: Norm,
        of_key: Norm,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        params: AttentionParams,
    ) -> None:
        """Bind the weights.

        Args:
            qkv: queries, keys and values side by side.
            o_proj: of attention's output.
            gate_up: gate and up projection side by side.
            down_proj: back to the hidden size.
            before_attention: norm of the hidden state.
            before_mlp: norm of the hidden state after attention.
            of_query: norm over each head of the queries, or None.
            of_key: norm over each head of the keys, or None.
            num_heads: heads of the queries.
            num_kv_heads: heads of K and V.
            head_size: channels of each.
            params: scale and window of attention; it has no softcap and no sinks.

        Raises:
            KernelError: if they do not fit each other.
        """
        self.hidden_size = qkv[0].in_features
        self.head_size = head_size
        for norm, size in (
            (before_attention, self.hidden_size),
            (before_mlp, self.hidden_size),
            (of_query, head_size),
            (of_key, head_size),
        ):
            if norm is not None:
                check_tensor("weight of a norm", norm[0], torch.float32, (size,))
        # Only addresses go to C++: the tensors must live as long as this does.
        self._tensors = (
            *(qkv, o_proj, gate_up, down_proj),
            *(before_attention, before_mlp, of_query, of_key),
        )
        try:
            self.native = _native.DecoderLayer(
                _native_product(qkv),
                _native_product(o_proj),
                _native_product(gate_up),
                _native_product(down_proj),
                _native_norm(before_attention),
                _native_norm(before_mlp),
                _native_norm(of_query),
                _native_norm(of_key),
                num_heads,
                num_kv_heads,
                head_size,
                params.softmax_scale,
                params.sliding_window or 0,
            )
        except ValueError as error:
            raise KernelError(str(error)) from error


def _without_loss(weight: torch.Tensor) -> torch.Tensor:
    """The weight in the narrowest type that holds it exactly."""
    if weight.dtype not in WEIGHT_DTYPES:
        raise KernelError(f"A weight of {weight.dtype} cannot be packed: give a float type.")
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            narrow = weight.to(dtype)
            if torch.equal(narrow.float(), weight):
                return narrow
    return weight


def _native_product(product: Product) -> tuple[str, int, int, int, int]:
    weight, bias = product
    return (
        weight.code,
        weight.panels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        weight.in_features,
        weight.out_features,
    )


def _native_norm(norm: Norm) -> tuple[int, float]:
    return (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
