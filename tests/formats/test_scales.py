"""Static scales: what they cover, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tightkv.errors import ScaleError
from tightkv.formats import Granularity, TensorScale

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, NAN, INF, -INF])
@pytest.mark.parametrize("shape", [(), (3,), (3, 4)])
def test_unusable_values(bad: float, shape: tuple[int, ...]) -> None:
    values = torch.ones(shape)
    values.view(-1)[-1] = bad
    with pytest.raises(ScaleError) as error:
        TensorScale(values)
    message = str(error.value)
    assert f"is {bad}:" in message
    assert message.endswith("recalibrate.")


def test_smallest_and_largest_values_are_usable() -> None:
    TensorScale(torch.tensor([1e-45, 3e38]))


def test_more_dimensions_than_a_granularity_has() -> None:
    with pytest.raises(ScaleError, match=r"shape \[2, 3, 4\]"):
        TensorScale(torch.ones(2, 3, 4))


@pytest.mark.parametrize(
    ("values", "granularity", "expected"),
    [
        (torch.tensor(2.0), Granularity.TENSOR, [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]),
        (torch.tensor([1.0, 2.0]), Granularity.HEAD, [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]),
        (
            torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
            Granularity.CHANNEL,
            [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
        ),
    ],
)
def test_per_channel(
    values: torch.Tensor, granularity: Granularity, expected: list[list[float]]
) -> None:
    scale = TensorScale(values.double())
    assert scale.granularity is granularity
    factors = scale.per_channel(2, 3)
    assert factors.tolist() == expected
    assert factors.dtype == torch.float32
    assert factors.is_contiguous()  # the C++ kernels read it by address


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 4), (3, 3), (2, 1)])
def test_scales_of_another_model(shape: tuple[int, ...]) -> None:
    scale = TensorScale(torch.ones(shape))
    with pytest.raises(ScaleError) as error:
        scale.per_channel(2, 3)
    message = str(error.value)
    assert str(list(shape)) in message
    assert str([2, 3][: len(shape)]) in message


def test_fingerprint_differs_whenever_the_scales_do() -> None:
    ones = torch.ones(2)
    scales = [
        TensorScale(ones),
        TensorScale(ones, dynamic=True),
        TensorScale(torch.ones(2, 1)),
        TensorScale(torch.tensor([1.0, 1.0000001])),
        TensorScale(torch.tensor(1.0)),
    ]
    fingerprints = [scale.fingerprint() for scale in scales]
    assert len(set(fingerprints)) == len(scales)
    assert TensorScale(torch.ones(2)).fingerprint() == fingerprints[0]
