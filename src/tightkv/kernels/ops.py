"""The two operations, with their checks; a backend does the work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tightkv.errors import KernelError
from tightkv.formats.layout import BlockLayout
from tightkv.kernels import reference
from tightkv.kernels.arguments import (
    AttentionBatch,
    AttentionParams,
    LayerCache,
    check_shape,
    check_tensor,
)
from tightkv.kernels.cpu import CpuBackend

__all__ = ["Backend", "ReferenceBackend", "paged_attention", "reshape_and_cache", "select_backend"]


class Backend(Protocol):
    """Kernels of one kind. `name` and `reason` are for the start-up log."""

    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str: ...

    def check_layout(self, layout: BlockLayout) -> None:
        """Raise KernelError if there is no kernel for it."""

    def reshape_and_cache(
        self,
        cache: LayerCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        clip_counts: torch.Tensor,
        bad_tokens: torch.Tensor,
    ) -> None: ...

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ReferenceBackend:
    """The specification in torch, for tests and for measuring the others against."""

    name: str = "reference (torch, slow)"
    reason: str = "asked for"

    def check_layout(self, layout: BlockLayout) -> None:
        """Every layout is served."""

    reshape_and_cache = staticmethod(reference.reshape_and_cache)
    paged_attention = staticmethod(reference.paged_attention)


def select_backend(device: torch.device) -> Backend:
    """The kernels for a device.

    Raises:
        KernelError: if there are none.
    """
    if device.type == "cpu":
        return CpuBackend.choose()
    if device.type == "cuda":
        return _triton_backend(device)
    raise KernelError(f"There are no kernels for the device {device}: use cpu or cuda.")


def _triton_backend(device: torch.device) -> Backend:
    try:
        from tightkv.kernels.triton import TritonBackend
    except ImportError as error:
        raise KernelError(
            f"The kernels for the device {device} need Triton, which cannot be imported ({error}): "
            "pip install 'tightkv[triton]'."
        ) from error
    return TritonBackend(device, "the kernels for GPUs")


def reshape_and_cache(
    backend: Backend,
    cache: LayerCache,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    clip_counts: torch.Tensor,
    bad_tokens: torch.Tensor,
) -> None:
    """Quantize K and V of this step's tokens and store them. Never raises on their values.

    Args:
        backend: whose kernel to use.
        cache: the layer's blocks.
        key: `[num_tokens, num_kv_heads, head_size]`, after RoPE; channels contiguous.
        value: `[num_tokens, num_kv_heads, value_size]`; channels contiguous.
        slot_mapping: int64 `[num_tokens]`, `block_id * block_size + offset in the block`.
        clip_counts: int64 `[2]`; the clipped values of K and of V are added.
        bad_tokens: bool `[num_tokens]`; set where K or V has a NaN or Inf, which is stored as 0.

    Raises:
        KernelError: if shapes do not fit.
    """
    layout, num_tokens = cache.layout, len(slot_mapping)
    check_shape("key", key, (num_tokens, layout.num_kv_heads, layout.head_size))
    check_shape("value", value, (num_tokens, layout.num_kv_heads, layout.value_size))
    check_tensor("slot_mapping", slot_mapping, torch.int64, (num_tokens,))
    check_tensor("clip_counts", clip_counts, torch.int64, (2,))
    check_tensor("bad_tokens", bad_tokens, torch.bool, (num_tokens,))
    backend.reshape_and_cache(cache, key, value, slot_mapping, clip_counts, bad_tokens)


def paged_attention(
    backend: Backend,
    query: torch.Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    params: AttentionParams,
) -> torch.Tensor:
    """Causal attention of any mix of prefill chunks and decodes over the paged cache.

    The queries of a sequence are its last tokens, and their K and V are in the cache already:
    each is read from there, also by the queries of the same step. A row's result does not depend
    on the other rows.

    Args:
        backend: whose kernel to use.
        query: `[num_tokens, num_heads, head_size]`; channels contiguous.
        cache: the layer's blocks.
        batch: lengths and block tables.
        params: scale, window, softcap, sinks.

    Returns:
        float32 `[num_tokens, num_heads, value_size]`.

    Raises:
        KernelError: if shapes do not fit.
    """
    layout, num_heads = cache.layout, query.shape[1]
    check_shape("query", query, (len(query), num_heads, layout.head_size))
    if num_heads % layout.num_kv_heads:
        raise KernelError(
            f"{num_heads} query heads cannot share {layout.num_kv_heads} KV heads: "
            "the first number must be a multiple of the second."
        )
    if params.sinks is not None:
        check_tensor("sinks", params.sinks, torch.float32, (num_heads,))
    if len(query) == 0:
        return query.new_empty(0, num_heads, layout.value_size, dtype=torch.float32)
    return backend.paged_attention(query, cache, batch, params)
