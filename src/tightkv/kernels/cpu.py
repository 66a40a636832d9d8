"""The C++ kernels, one instance per instruction set. Every call releases the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

# After torch, so that both share torch's OpenMP runtime and its threads.
from tightkv.errors import KernelError
from tightkv.formats.base import TensorFormat
from tightkv.formats.layout import BlockLayout
from tightkv.kernels import _native
from tightkv.kernels.arguments import (
    AttentionBatch,
    AttentionParams,
    LayerCache,
    LayerStep,
    check_shape,
    check_tensor,
)
from tightkv.kernels.weights import DecoderLayerWeights, WeightPanels

__all__ = ["ISA_VARIABLE", "CpuBackend", "available_isas"]

P = ParamSpec("P")
T = TypeVar("T")

_BOUND = "cpu"  # under which name arguments keep their native form

ISA_VARIABLE = "TIGHTKV_CPU_ISA"
"""Environment variable that names the instruction set to use instead of the best one."""


def available_isas() -> tuple[str, ...]:
    """Instruction sets that this build and this processor have, the best first."""
    return tuple(_native.available_isas())


class CpuBackend:
    """C++ kernels of one instruction set.

    Attributes:
        isa: "avx512_vnni", "avx512", "avx_vnni", "avx2", "neon" or "scalar".
        reason: why this one was chosen.
    """

    def __init__(self, isa: str, reason: str = "asked for") -> None:
        if isa not in available_isas():
            raise KernelError(
                f"Instruction set {isa!r} is not available: this build and processor have "
                f"{', '.join(available_isas())}."
            )
        self.isa = isa
        self.reason = reason
        self._kernels = _native.kernels(isa)

    @classmethod
    def choose(cls) -> CpuBackend:
        """The best instruction set, or the one that `TIGHTKV_CPU_ISA` names.

        Raises:
            KernelError: if the named one is not available.
        """
        isas = available_isas()
        wanted = os.environ.get(ISA_VARIABLE)
        if wanted is None:
            return cls(isas[0], f"the best of {', '.join(isas)} on this processor")
        return cls(wanted, f"named by {ISA_VARIABLE}")

    @property
    def name(self) -> str:
        return f"C++ {self.isa}"

    def check_layout(self, layout: BlockLayout) -> None:
        _native_layout(layout)

    def reshape_and_cache(
        self,
        cache: LayerCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        clip_counts: torch.Tensor,
        bad_tokens: torch.Tensor,
    ) -> None:
        key, value = _float32(key), _float32(value)
        clipped = _checked(
            self._kernels.reshape_and_cache,
            _native_cache(cache),
            _strided(key),
            _strided(value),
            slot_mapping.data_ptr(),
            bad_tokens.data_ptr(),
            len(slot_mapping),
            torch.get_num_threads(),
        )
        if any(clipped):
            clip_counts += torch.tensor(clipped)

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> torch.Tensor:
        query = _float32(query)
        num_tokens, num_heads, _ = query.shape
        out = torch.empty(num_tokens, num_heads, cache.layout.value_size)
        _checked(
            self._kernels.paged_attention,
            _native_cache(cache),
            _native_batch(batch),
            _strided(query),
            num_tokens,
            num_heads,
            params.softmax_scale,
            params.sliding_window or 0,
            params.softcap or 0.0,
            _address(params.sinks),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def linear(
        self,
        x: torch.Tensor,
        weight: WeightPanels,
        bias: torch.Tensor | None = None,
        other: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x @ weight.T + bias + other` in float32; a row's bits are the same in any batch.

        Args:
            x: float32 `[num_rows, in_features]`, inputs of a row contiguous.
            weight: `[out_features, in_features]`, packed.
            bias: float32 `[out_features]`, or None.
            other: float32 `[num_rows, out_features]`, or None.
        """
        num_rows, out_features = len(x), weight.out_features
        check_shape("x", x, (num_rows, weight.in_features))
        if bias is not None:
            check_tensor("bias", bias, torch.float32, (out_features,))
        if other is not None:
            check_tensor("other", other, torch.float32, (num_rows, out_features))
        if x.dtype != torch.float32 or x.stride(1) != 1:
            raise KernelError(
                f"x must be float32 with contiguous rows, not {x.dtype} {x.stride()}."
            )
        out = torch.empty(num_rows, out_features)
        self._kernels.linear(
            weight.code,
            weight.panels.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            _address(bias),
            _address(other),
            out.data_ptr(),
            num_rows,
            weight.in_features,
            out_features,
            torch.get_num_threads(),
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """`weight * x / sqrt(mean(x ** 2) + epsilon)` (arXiv:1910.07467).

        Args:
            x: float32 `[num_tokens, num_heads, size]`, channels contiguous; the norm is over them.
            weight: float32 `[size]`.
            epsilon: added to the mean of squares.
        """
        num_tokens, num_heads, size = x.shape
        check_tensor("weight", weight, torch.float32, (size,))
        out = torch.empty(x.shape)
        self._kernels.rms_norm(
            _strided(x),
            _strided(out),
            num_tokens,
            num_heads,
            size,
            weight.data_ptr(),
            epsilon,
            torch.get_num_threads(),
        )
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """RoPE in place (arXiv:2104.09864); channel `c` turns with channel `c + size / 2`.

        Args:
            x: float32 `[num_tokens, num_heads, size]`, channels contiguous.
            cos: float32 `[num_tokens, size]`.
            sin: float32 `[num_tokens, size]`.
        """
        num_tokens, num_heads, size = x.shape
        check_tensor("cos", cos, torch.float32, (num_tokens, size))
        check_tensor("sin", sin, torch.float32, (num_tokens, size))
        self._kernels.rotary_embedding(
            _strided(x),
            num_tokens,
            num_heads,
            size,
            cos.data_ptr(),
            sin.data_ptr(),
            torch.get_num_threads(),
        )

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` (arXiv:2002.05202) of float32 `[num_tokens, 2 * size]`, gate first."""
        num_tokens, size = len(x), x.shape[1] // 2
        check_tensor("x", x, torch.float32, (num_tokens, 2 * size))
        out = torch.empty(num_tokens, size)
        self._kernels.silu_and_mul(
            x.data_ptr(), out.data_ptr(), num_tokens, size, torch.get_num_threads()
        )
        return out

    def decoder_layer(
        self,
        weights: DecoderLayerWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: LayerStep,
    ) -> torch.Tensor:
        """A decoder layer in one call; the same bits as by the methods above, one after another.

        K and V of all tokens are written, and what follows is computed for the tokens that come
        out. If these are all, they come out in place of `hidden`.

        Args:
            weights: of the layer.
            hidden: float32 `[num_tokens, hidden_size]`; not to be used afterwards.
            cos: float32 `[num_tokens, head_size]`.
            sin: float32 `[num_tokens, head_size]`.
            step: where K and V go, and what comes out.

        Returns:
            float32 `[num_rows, hidden_size]`.
        """
        num_tokens, rows = len(hidden), step.rows
        check_tensor("hidden", hidden, torch.float32, (num_tokens, weights.hidden_size))
        check_tensor("cos", cos, torch.float32, (num_tokens, weights.head_size))
        check_tensor("sin", sin, torch.float32, (num_tokens, weights.head_size))
        check_tensor("slot_mapping", step.slot_mapping, torch.int64, (num_tokens,))
        check_tensor("bad_tokens", step.bad_tokens, torch.bool, (num_tokens,))
        out = hidden
        if rows is not None:
            check_tensor("rows", rows, torch.int64, (len(rows),))
            out = torch.empty(len(rows), weights.hidden_size)
        clipped = _checked(
            self._kernels.decoder_layer,
            weights.native,
            _native_cache(step.cache),
            _native_batch(step.batch),
            step.slot_mapping.data_ptr(),
            step.bad_tokens.data_ptr(),
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_tokens,
            _address(rows),
            len(out),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if any(clipped):
            step.clip_counts.add_(torch.tensor(clipped))
        return out


def _checked(kernel: Callable[P, T], *arguments: P.args, **unused: P.kwargs) -> T:
    """Call into C++, whose checks raise ValueError."""
    try:
        return kernel(*arguments, **unused)
    except ValueError as error:
        raise KernelError(str(error)) from error


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float32 else tensor.float()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strided(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address and strides of float32 `[num_tokens, heads, size]` whose channels touch."""
    of_tokens, of_heads, of_channels = tensor.stride()
    if of_channels != 1:
        raise KernelError(f"Channels must be contiguous, but their stride is {of_channels}.")
    return tensor.data_ptr(), of_tokens, of_heads


def _native_cache(cache: LayerCache) -> _native.LayerCache:
    if _BOUND not in cache.bound:
        cache.bound[_BOUND] = _native.LayerCache(
            _native_layout(cache.layout),
            cache.blocks.data_ptr(),
            len(cache.blocks),
            _address(cache.k_scale),
            _address(cache.v_scale),
        )
    bound: _native.LayerCache = cache.bound[_BOUND]
    return bound


def _native_batch(batch: AttentionBatch) -> _native.Batch:
    if _BOUND not in batch.bound:
        batch.bound[_BOUND] = _checked(
            _native.Batch,
            batch.query_start_loc.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.block_table.data_ptr(),
            len(batch.seq_lens),
            batch.block_table.shape[1],
        )
    bound: _native.Batch = batch.bound[_BOUND]
    return bound


def _native_layout(layout: BlockLayout) -> _native.Layout:
    def tensor(
        tensor_format: TensorFormat, size: int, padded: int, codes: int, scales: int
    ) -> _native.TensorLayout:
        return _native.TensorLayout(
            code=tensor_format.code.name,
            dynamic=tensor_format.dynamic,
            size=size,
            padded_size=padded,
            codes_offset=codes,
            scales_offset=scales,
        )

    try:
        return _native.Layout(
            block_bytes=layout.stride,
            block_size=layout.block_size,
            num_kv_heads=layout.num_kv_heads,
            k=tensor(
                layout.k_format,
                layout.head_size,
                layout.padded_head_size,
                layout.k_offset,
                layout.k_scale_offset,
            ),
            v=tensor(
                layout.v_format,
                layout.value_size,
                layout.padded_value_size,
                layout.v_offset,
                layout.v_scale_offset,
            ),
        )
    except ValueError as error:
        raise KernelError(f"The C++ kernels cannot serve this layer: {error}") from error
