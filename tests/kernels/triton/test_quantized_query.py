"""Queries rounded to int8: as far from exact as rounding explains, and never unasked for."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from attention_cases import (
    assert_near_reference,
    assert_rows_are_the_same_alone,
    attend,
    params_for,
)
from cache_cases import Scene, make_scene
from tightkv.errors import KernelError
from tightkv.kernels.ops import ReferenceBackend
from tightkv.kernels.reference import read_sequence
from triton_cases import DEVICE, triton_backend

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tightkv[triton]'")

K_FORMATS = ["int8+head", "int8+dynamic", "int8+channel+dynamic"]


def small_scene(k: str, v: str = "float16") -> Scene:
    """A decode over two partitions of keys, and a chunk of a prompt; one KV head."""
    return make_scene(k=k, v=v, lengths=((1, 270), (3, 40)), num_kv_heads=1, head_size=32)


def static_factors(scene: Scene) -> torch.Tensor:
    factors = scene.cache.k_scale
    return torch.ones(1, 32) if factors is None else factors


def steps_of(scene: Scene) -> torch.Tensor:
    """What a row of queries is rounded to whole numbers of, after the static factors."""
    rows = scene.query * static_factors(scene)
    return rows.abs().amax(dim=-1, keepdim=True) / 127.0


def logit_error(scene: Scene) -> float:
    """Half a step at most in each channel, times the key there: the largest sum of these."""
    scale = params_for(scene).softmax_scale
    worst = 0.0
    for table, seq_len in zip(scene.batch.block_table, scene.batch.seq_lens.tolist(), strict=True):
        keys = read_sequence(scene.cache, table, seq_len)[0] / static_factors(scene)
        worst = max(worst, keys.abs().sum(dim=-1).max().item())
    return scale * 0.5 * steps_of(scene).max().item() * worst


@pytest.mark.parametrize("k", K_FORMATS)
def test_error_is_that_of_rounding_the_query(k: str) -> None:
    scene = small_scene(k)
    rounded = (scene.query * static_factors(scene) / steps_of(scene)).round() * steps_of(scene)
    as_rounded = replace(scene, query=rounded / static_factors(scene))
    params = params_for(scene)
    got = attend(triton_backend(quantize_query=True), scene, params)
    same = attend(ReferenceBackend(), as_rounded, params)
    assert (got - same).abs().max() <= scene.tolerance * same.abs().max()


@pytest.mark.parametrize("k", K_FORMATS)
def test_error_has_a_bound(k: str) -> None:
    """Logits off by d: weights off by a factor within e^-2d and e^2d, and so the sum of V."""
    scene = small_scene(k)
    params = params_for(scene)
    exact = attend(ReferenceBackend(), scene, params)
    got = attend(triton_backend(quantize_query=True), scene, params)
    largest = max(
        read_sequence(scene.cache, table, seq_len)[1].abs().max().item()
        for table, seq_len in zip(
            scene.batch.block_table, scene.batch.seq_lens.tolist(), strict=True
        )
    )
    bound = (torch.tensor(2 * logit_error(scene)).expm1() * largest).item()
    assert (got - exact).abs().max() <= bound
    assert bound < 0.5 * largest  # says something
    assert (got - exact).abs().max() > 10 * scene.tolerance * exact.abs().max()  # is not hidden


@pytest.mark.parametrize("v", ["float16", "int8+channel+dynamic"])
def test_whole_queries_lose_nothing(v: str) -> None:
    scene = small_scene("int8+dynamic", v)
    query = torch.randint(-127, 128, scene.query.shape).float()
    query[..., 7] = 127.0
    whole = replace(scene, query=query / 64)
    params = params_for(whole)
    exact = attend(triton_backend(), whole, params)
    assert torch.equal(attend(triton_backend(quantize_query=True), whole, params), exact)
    assert_near_reference([triton_backend(quantize_query=True)], whole)


def test_row_alone_is_the_row_in_any_batch() -> None:
    scene = small_scene("int8+channel+dynamic", "int8+channel+dynamic")
    params = params_for(scene, sliding_window=100, softcap=5.0, sinks=torch.tensor([0.0, 1.0]))
    assert_rows_are_the_same_alone(triton_backend(quantize_query=True), scene, params, [1, 0])


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-36, 1e30])
def test_queries_of_any_size(size: float) -> None:
    """Tiny ones weigh all keys alike; large ones choose one key."""
    scene = small_scene("int8+dynamic")
    scaled = replace(scene, query=scene.query * size)
    got = attend(triton_backend(quantize_query=True), scaled, params_for(scene))
    assert got.isfinite().all()
    if size < 1:
        assert_near_reference([triton_backend(quantize_query=True)], scaled)


def test_query_that_is_not_finite_spoils_its_row_only() -> None:
    scene = small_scene("int8+dynamic")
    query = scene.query.clone()
    query[1, 0, 3] = float("nan")
    got = attend(triton_backend(quantize_query=True), scene, params_for(scene), query)
    assert got[1, 0].isnan().all()
    got[1, 0] = 0.0
    assert got.isfinite().all()


def is_one_sentence(message: str) -> bool:
    return message.endswith(".") and ". " not in message and "\n" not in message


@pytest.mark.parametrize("k", ["float16", "fp8_e4m3+dynamic"])
def test_float_codes_of_k_are_refused(k: str) -> None:
    scene, backend = small_scene(k, "int8+dynamic"), triton_backend(quantize_query=True)
    with pytest.raises(KernelError, match="this layer's K has float codes") as error:
        backend.check_layout(scene.cache.layout)
    assert is_one_sentence(str(error.value))
    with pytest.raises(KernelError, match="this layer's K has float codes"):
        attend(backend, scene, params_for(scene))
    triton_backend().check_layout(scene.cache.layout)


def test_devices_without_the_products_are_refused() -> None:
    from tightkv.kernels.triton import backend
    from tightkv.kernels.triton.shapes import DeviceTraits

    traits = (DeviceTraits(ptx=False), "another vendor's GPU")
    with mock.patch.object(backend, "_traits_of", return_value=traits):
        backend.TritonBackend(DEVICE)
        with pytest.raises(KernelError, match="which another vendor's GPU is not known") as error:
            backend.TritonBackend(DEVICE, quantize_query=True)
    assert "8.0" in str(error.value)


def test_it_says_so() -> None:
    assert "queries rounded to int8" in triton_backend(quantize_query=True).name
    assert "rounded" not in triton_backend().name
