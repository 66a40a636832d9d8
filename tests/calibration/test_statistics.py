"""Magnitudes, gathered window by window."""

from __future__ import annotations

import pytest
import torch

from tightkv.calibration.statistics import NUM_SINKS, LayerStatistics, TensorStatistics
from tightkv.kernels import AttentionParams
from tightkv.models import AttentionCall


def windows(count: int, tokens: int = 60) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, tokens, 2, 8, generator=generator)
    x[:, :NUM_SINKS] *= 10
    return x * torch.logspace(-3, 2, 8)


def test_absmax_knows_sinks_from_the_rest() -> None:
    x, found = windows(3), TensorStatistics(2, 8)
    for window in x:
        found.add(window)
    assert torch.equal(found.sink_absmax, x[:, :NUM_SINKS].abs().amax(dim=(0, 1)))
    assert torch.equal(found.absmax, x[:, NUM_SINKS:].abs().amax(dim=(0, 1)))
    assert torch.equal(found.range, x.abs().amax(dim=(0, 1)))


def test_percentiles_are_within_a_bin() -> None:
    x, found = windows(20), TensorStatistics(2, 8)
    for window in x:
        found.add(window)
    rest = x[:, NUM_SINKS:].abs().reshape(-1, 2, 8)
    for share in (0.5, 0.9, 0.99):
        exact = rest.quantile(share, dim=0)
        ratio = found.percentile(share) / exact
        assert bool(((ratio > 0.99) & (ratio < 2 ** (1 / 8) * 1.03)).all())
    assert bool((found.percentile(1.0) <= found.absmax).all())


def test_memory_does_not_grow_with_the_text() -> None:
    found = TensorStatistics(2, 8)
    found.add(windows(1)[0])
    before = found.histogram.numel()
    for window in windows(5):
        found.add(window)
    assert found.histogram.numel() == before
    assert int(found.histogram.sum()) == 6 * (60 - NUM_SINKS) * 16


def test_zeros_and_short_windows() -> None:
    found = TensorStatistics(1, 4)
    found.add(torch.zeros(10, 1, 4))
    found.add(torch.ones(2, 1, 4))  # sinks alone
    assert found.absmax.max() == 0
    assert found.range.tolist() == [[1.0] * 4]


def test_outlier_ratio() -> None:
    found = TensorStatistics(1, 5)
    found.add(torch.tensor([1.0, 2.0, 3.0, 4.0, 90.0]).expand(8, 1, 5))
    assert found.outlier_ratio == pytest.approx(30)


def test_query_rms_is_over_the_group() -> None:
    query, key = torch.randn(12, 4, 8), torch.randn(12, 2, 8)
    found = LayerStatistics(2, 8, 8)
    for _ in range(2):
        found.add(AttentionCall(0, query, key, key, AttentionParams(1.0), key))
    expected = (query**2).view(12, 2, 2, 8).mean(dim=(0, 2)).sqrt()
    torch.testing.assert_close(found.query_rms, expected)
