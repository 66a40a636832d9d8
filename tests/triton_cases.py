"""What the tests of the Triton kernels share: the backend, and tensors on its device.

Without a GPU Triton's interpreter runs the kernels, some ten milliseconds per program: sizes are
as small as the tiles allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tightkv.kernels import AttentionBatch, LayerCache

if TYPE_CHECKING:
    from tightkv.kernels.triton import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def triton_backend(*, quantize_query: bool = False) -> TritonBackend:
    """The kernels; the test is skipped where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'tightkv[triton]'")
    from tightkv.kernels.triton import TritonBackend

    return TritonBackend(DEVICE, quantize_query=quantize_query)


def moved_cache(cache: LayerCache, device: torch.device = DEVICE) -> LayerCache:
    """A copy."""
    return LayerCache(
        cache.blocks.clone().to(device),
        cache.layout,
        *(None if scale is None else scale.to(device) for scale in (cache.k_scale, cache.v_scale)),
    )


def moved_batch(batch: AttentionBatch) -> AttentionBatch:
    return AttentionBatch(
        batch.query_start_loc.to(DEVICE),
        batch.seq_lens.to(DEVICE),
        batch.block_table.to(DEVICE),
        batch.max_query_len,
    )
