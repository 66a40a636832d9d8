"""What the tests of the Triton kernels share: the backend, and scenes on its device.

Without a GPU Triton's interpreter runs the kernels, some ten milliseconds per program: sizes are
as small as the tiles allow.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from cache_cases import Scene
from tightkv.kernels import AttentionBatch, AttentionParams, LayerCache, paged_attention
from tightkv.kernels.ops import ReferenceBackend

if TYPE_CHECKING:
    from tightkv.kernels.triton import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def triton_backend() -> TritonBackend:
    """The kernels; the test is skipped where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'tightkv[triton]'")
    from tightkv.kernels.triton import TritonBackend

    return TritonBackend(DEVICE)


def moved_cache(cache: LayerCache, device: torch.device = DEVICE) -> LayerCache:
    """A copy."""
    return LayerCache(
        cache.blocks.clone().to(device),
        cache.layout,
        *(None if scale is None else scale.to(device) for scale in (cache.k_scale, cache.v_scale)),
    )


def moved_batch(batch: AttentionBatch) -> AttentionBatch:
    return AttentionBatch(
        batch.query_start_loc.to(DEVICE), batch.seq_lens.to(DEVICE), batch.block_table.to(DEVICE)
    )


def params_for(scene: Scene, **changes: object) -> AttentionParams:
    plain = AttentionParams(softmax_scale=1 / math.sqrt(scene.cache.layout.head_size))
    return replace(plain, **changes)  # type: ignore[arg-type]


def attend(
    scene: Scene,
    params: AttentionParams,
    query: torch.Tensor | None = None,
    batch: AttentionBatch | None = None,
) -> torch.Tensor:
    """Of a scene on the CPU, there and back again."""
    query = scene.query if query is None else query
    batch = scene.batch if batch is None else batch
    if params.sinks is not None:
        params = replace(params, sinks=params.sinks.to(DEVICE))
    cache = moved_cache(scene.cache)
    result = paged_attention(triton_backend(), query.to(DEVICE), cache, moved_batch(batch), params)
    return result.cpu()


def assert_near_reference(scene: Scene, **changes: object) -> None:
    """Within the tolerance of the formats."""
    params = params_for(scene, **changes)
    expected = paged_attention(ReferenceBackend(), scene.query, scene.cache, scene.batch, params)
    got = attend(scene, params)
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    assert error <= scene.tolerance, f"{error:.1e}"
