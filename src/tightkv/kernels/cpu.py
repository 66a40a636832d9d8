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
from tightkv.formats.registry import dtype_name
from tightkv.kernels import _native
from tightkv.kernels.arguments import (
    AttentionBatch,
    AttentionParams,
    LayerCache,
    check_shape,
    check_tensor,
)

__all__ = ["ISA_VARIABLE", "WEIGHT_DTYPES", "CpuBackend", "WeightPanels", "available_isas"]

P = ParamSpec("P")
T = TypeVar("T")

_LANES = 16
_BOUND = "cpu"  # under which name arguments keep their native form

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the weights of a packed linear layer may be."""

ISA_VARIABLE = "TIGHTKV_CPU_ISA"
"""Environment variable that names the instruction set to use instead of the best one."""


def available_isas() -> tuple[str, ...]:
    """Instruction sets that this build and this processor have, the best first."""
    return tuple(_native.available_isas())


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


def _checked(kernel: Callable[P, T], *arguments: P.args, **unused: P.kwargs) -> T:
    """Call into C++, whose checks raise ValueError."""
    try:
        return kernel(*arguments, **unused)
    except ValueError as error:
        raise KernelError(str(error)) from error


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float32 else tensor.float()


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
            block_bytes=layout.block_bytes,
            block_size=layout.block_size,
            num_kv_heads=layout.num_kv_heads,
            k=tensor(
                layout.k_format,
                layout.head_size,
                layout.padded_head_size,
                0,
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
