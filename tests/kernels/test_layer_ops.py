"""What lies between a decoder layer's products, against torch."""

from __future__ import annotations

import pytest
import torch

from cache_cases import ISAS
from tightkv.errors import KernelError
from tightkv.kernels import CpuBackend, WeightPanels

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
def test_no_tokens_are_no_work(isa: str) -> None:
    backend, none = CpuBackend(isa), torch.zeros(0, 32)
    assert backend.rms_norm(none[:, None], torch.ones(32), 1e-5).shape == (0, 1, 32)
    backend.rotate(none[:, None], none, none)
    assert backend.silu_and_mul(none).shape == (0, 16)
    assert backend.linear(none, WeightPanels(random(8, 32))).shape == (0, 8)


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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (7, 5), (50, 161)])
def test_linear(isa: str, dtype: torch.dtype, in_features: int, out_features: int) -> None:
    backend = CpuBackend(isa)
    weight = random(out_features, in_features).to(dtype)
    panels = WeightPanels(weight)
    x, bias, other = random(101, in_features), random(out_features), random(101, out_features)
    product = x.double() @ weight.double().T
    whole = backend.linear(x, panels, bias, other)
    torch.testing.assert_close(whole.double(), product + bias + other, rtol=1e-5, atol=1e-4)
    for rows in (1, 2, 3, 5, 6, 7, 13, 48, 49):
        assert torch.equal(backend.linear(x[:rows], panels, bias, other[:rows]), whole[:rows])
    plain = backend.linear(x[-1:], panels)
    torch.testing.assert_close(plain.double(), product[-1:], rtol=1e-5, atol=1e-4)


def test_a_weight_is_kept_as_narrow_as_it_is() -> None:
    weight = random(32, 16)
    assert WeightPanels(weight).code == "float32"
    assert WeightPanels(weight.bfloat16().float()).code == "bfloat16"
    assert WeightPanels(weight.half().float()).code == "float16"
    assert WeightPanels(weight * float("nan")).code == "float32"
    with pytest.raises(KernelError, match="int8"):
        WeightPanels(weight.to(torch.int8))


def test_wrong_shapes_are_refused() -> None:
    backend = CpuBackend(ISAS[0])
    panels = WeightPanels(random(8, 16))
    with pytest.raises(KernelError, match="x has shape"):
        backend.linear(random(2, 15), panels)
    with pytest.raises(KernelError, match="other has shape"):
        backend.linear(random(2, 16), panels, other=random(1, 8))
    with pytest.raises(KernelError, match="float32 with contiguous rows"):
        backend.linear(random(16, 2).T, panels)
    with pytest.raises(KernelError, match="weight has shape"):
        backend.rms_norm(random(2, 1, 16), torch.ones(8), 1e-5)
    with pytest.raises(KernelError, match="cos has shape"):
        backend.rotate(random(2, 1, 16), random(2, 8), random(2, 16))
    with pytest.raises(KernelError, match="contiguous"):
        backend.silu_and_mul(random(4, 32)[:, :16])
