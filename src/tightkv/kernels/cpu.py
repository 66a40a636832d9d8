"""The C++ kernels, one instance per instruction set. Every call releases the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

import torch

# After torch, so that both share torch's OpenMP runtime and its threads.
from tightkv.errors import KernelError
from tightkv.formats.base import TensorFormat
from tightkv.formats.layout import BlockLayout
from tightkv.kernels import _native
from tightkv.kernels.arguments import AttentionBatch, AttentionParams, LayerCache

__all__ = ["ISA_VARIABLE", "CpuBackend", "available_isas"]

P = ParamSpec("P")
T = TypeVar("T")

ISA_VARIABLE = "TIGHTKV_CPU_ISA"
"""Environment variable that names the instruction set to use instead of the best one."""


def available_isas() -> tuple[str, ...]:
    """Instruction sets that this build and this processor have, the best first."""
    return tuple(_native.available_isas())


class CpuBackend:
    """C++ kernels of one instruction set.

    Attributes:
        isa: "avx512", "avx2", "neon" or "scalar".
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
        key, value = key.float(), value.float()
        clipped = _checked(
            self._kernels.reshape_and_cache,
            _native_layout(cache.layout),
            cache.blocks.data_ptr(),
            len(cache.blocks),
            _strided(key),
            _strided(value),
            _address(cache.k_scale),
            _address(cache.v_scale),
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
        query = query.float()
        out = query.new_empty(*query.shape[:2], cache.layout.value_size)
        _checked(
            self._kernels.paged_attention,
            _native_layout(cache.layout),
            cache.blocks.data_ptr(),
            len(cache.blocks),
            _strided(query),
            len(query),
            query.shape[1],
            _address(cache.k_scale),
            _address(cache.v_scale),
            batch.query_start_loc.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.block_table.data_ptr(),
            len(batch.seq_lens),
            batch.block_table.shape[1],
            params.softmax_scale,
            params.sliding_window or 0,
            params.softcap or 0.0,
            _address(params.sinks),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _checked(kernel: Callable[P, T], *arguments: P.args, **unused: P.kwargs) -> T:
    """Call into C++, whose checks raise ValueError."""
    try:
        return kernel(*arguments, **unused)
    except ValueError as error:
        raise KernelError(str(error)) from error


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _strided(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Address and strides of `[num_tokens, heads, size]` whose channels touch."""
    if tensor.stride(2) != 1:
        raise KernelError(f"Channels must be contiguous, but their stride is {tensor.stride(2)}.")
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)


@lru_cache(maxsize=1024)
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
