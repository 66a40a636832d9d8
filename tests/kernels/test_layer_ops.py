"""What lies between a decoder layer's products, against torch."""

from __future__ import annotations

import pytest
import torch

from cache_cases import ISAS
from tightkv.errors import KernelError
from tightkv.kernels import CpuBackend

SIZES = (8, 20, 64, 576)  # with and without a rest after whole tiles of 16


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(isa: str, size: int) -> None:
    x, weight = random(5, 3, 2 * size)[..., :size] * 7, random(size)
    expected = torch.nn.functional.rms_norm(x, (size,), weight, 1e-5)
    torch.testing.assert_close(CpuBackend(isa).rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", SIZES)
def test_rotate_is_the_rope_of_transformers(isa: str, size: int) -> None:
    joined = random(5, 4, size)
    query, rest = joined[:, :3], joined[:, 3:].clone()
    angles = random(5, size)
    cos, sin = angles.cos(), angles.sin()
    low, high = query.chunk(2, -1)
    expected = query * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
    CpuBackend(isa).rotate(query, cos, sin)
    assert torch.equal(query, expected)
    assert torch.equal(joined[:, 3:], rest)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", SIZES)
def test_silu_and_mul(isa: str, size: int) -> None:
    x = random(5, 2 * size) * 30
    x[0, :4] = torch.tensor([0.0, -200.0, 200.0, float("inf")])
    gate, up = x.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(CpuBackend(isa).silu_and_mul(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_broken_values_stay_broken(isa: str) -> None:
    backend = CpuBackend(isa)
    x = random(2, 32)
    x[1, 3] = float("nan")
    assert backend.silu_and_mul(x)[1, 3].isnan()
    assert backend.rms_norm(x[:, None], torch.ones(32), 1e-5)[1].isnan().all()
    assert backend.rms_norm(x[:, None], torch.ones(32), 1e-5)[0].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_is_the_same_alone_and_among_many(isa: str) -> None:
    """500 rows are shared among threads, one is not."""
    backend = CpuBackend(isa)
    x, weight = random(500, 1, 192), random(192)
    norm, gated = backend.rms_norm(x, weight, 1e-5), backend.silu_and_mul(x[:, 0])
    for row in (0, 249, 250, 499):
        alone = x[row : row + 1]
        assert torch.equal(backend.rms_norm(alone, weight, 1e-5)[0], norm[row])
        assert torch.equal(backend.silu_and_mul(alone[:, 0])[0], gated[row])


def test_wrong_shapes_are_refused() -> None:
    backend = CpuBackend(ISAS[0])
    with pytest.raises(KernelError, match="weight has shape"):
        backend.rms_norm(random(2, 1, 16), torch.ones(8), 1e-5)
    with pytest.raises(KernelError, match="cos has shape"):
        backend.rotate(random(2, 1, 16), random(2, 8), random(2, 16))
    with pytest.raises(KernelError, match="contiguous"):
        backend.silu_and_mul(random(4, 32)[:, :16])
