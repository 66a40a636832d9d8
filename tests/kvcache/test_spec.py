"""Bytes of a block: one function, an independent formula, and what is allocated."""

from __future__ import annotations

import pytest
import torch

from tightkv.formats import Granularity, TensorFormat, TensorScale, resolve_format
from tightkv.kernels.ops import ReferenceBackend
from tightkv.kvcache import KVCacheSpec, KVCacheStorage, group_layers

TWO_FACTOR = TensorScale(torch.ones(2, 64), dynamic=True)
STATIC = TensorScale(torch.tensor(1.0))

# bytes per code, bytes of the dynamic scale
FORMATS: dict[str, tuple[TensorFormat, int, int]] = {
    "float32": (resolve_format("float32", torch.float32), 4, 0),
    "float16": (resolve_format("float16", torch.float32), 2, 0),
    "bfloat16": (resolve_format("auto", torch.bfloat16), 2, 0),
    "int8 static": (resolve_format("int8", torch.float32, STATIC), 1, 0),
    "int8 two-factor": (resolve_format("int8", torch.float32, TWO_FACTOR), 1, 2),
    "int8_per_token_head": (resolve_format("int8_per_token_head", torch.float32), 1, 2),
    "fp8 static": (resolve_format("fp8", torch.float32, STATIC), 1, 0),
    "fp8 dynamic": (resolve_format("fp8", torch.float32), 1, 2),
    "fp8_e5m2": (resolve_format("fp8_e5m2", torch.float32), 1, 0),
}


def make_spec(
    layer_idx: int = 0,
    k: str = "float16",
    v: str = "float16",
    *,
    block_size: int = 16,
    num_kv_heads: int = 2,
    head_size: int = 64,
    value_size: int = 64,
    sliding_window: int | None = None,
) -> KVCacheSpec:
    return KVCacheSpec(
        layer_idx=layer_idx,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        value_size=value_size,
        k_format=FORMATS[k][0],
        v_format=FORMATS[v][0],
        sliding_window=sliding_window,
    )


@pytest.mark.parametrize("k", FORMATS)
@pytest.mark.parametrize("v", FORMATS)
def test_block_bytes(k: str, v: str) -> None:
    """Head sizes of 64 pad nothing: tokens x heads x (channels x code + scale)."""
    spec = make_spec(k=k, v=v, block_size=32, num_kv_heads=3, head_size=64, value_size=128)
    k_code, k_scale = FORMATS[k][1:]
    v_code, v_scale = FORMATS[v][1:]
    assert spec.block_bytes == 32 * 3 * (64 * k_code + k_scale + 128 * v_code + v_scale)


def test_padding_is_counted() -> None:
    """33 channels of K are stored as 34, 33 of V as 48; codes fill their cache lines."""
    spec = make_spec(
        k="int8 two-factor", v="int8 two-factor", num_kv_heads=1, head_size=33, value_size=33
    )
    k_codes, v_codes, scales = 16 * 34, 16 * 48, 16 * 2
    assert (k_codes, v_codes) == (8 * 64 + 32, 12 * 64)
    assert spec.block_bytes == 9 * 64 + 12 * 64 + 2 * scales
    only_k = make_spec(
        k="int8 two-factor", v="int8 static", num_kv_heads=1, head_size=33, value_size=33
    )
    assert only_k.block_bytes == 9 * 64 + 12 * 64 + 64


@pytest.mark.parametrize("name", FORMATS)
def test_effective_bits_are_the_bytes_of_a_block(name: str) -> None:
    spec = make_spec(k=name, v=name, num_kv_heads=2, head_size=128, value_size=128)
    values = 16 * 2 * (128 + 128)
    assert 8 * spec.block_bytes / values == FORMATS[name][0].effective_bits(128)


@pytest.mark.parametrize("k", FORMATS)
@pytest.mark.parametrize("v", FORMATS)
def test_predicted_bytes_are_allocated_bytes(k: str, v: str) -> None:
    specs = [
        make_spec(0, k, v, head_size=40),
        make_spec(1, v, k, value_size=17, sliding_window=7),
        make_spec(2, "float16", "int8 static", head_size=40),
    ]
    groups = group_layers(specs)
    storage = KVCacheStorage(groups, 5, torch.device("cpu"), ReferenceBackend())
    assert storage.num_bytes == 5 * sum(spec.block_bytes for spec in specs)
    assert storage.num_bytes == 5 * sum(group.block_bytes for group in groups)
    for spec in specs:
        blocks = storage.layer(spec.layer_idx).blocks
        assert blocks.untyped_storage().nbytes() == 5 * spec.block_bytes


def test_groups_are_kinds_of_attention_in_order_of_appearance() -> None:
    windows = [128, 128, None, 512, 128, None]
    specs = [make_spec(index, sliding_window=window) for index, window in enumerate(windows)]
    groups = group_layers(specs)
    assert [group.sliding_window for group in groups] == [128, None, 512]
    assert [[spec.layer_idx for spec in group.specs] for group in groups] == [
        [0, 1, 4],
        [2, 5],
        [3],
    ]


def test_formats_may_differ_inside_a_group() -> None:
    (group,) = group_layers([make_spec(0, "float16"), make_spec(1, "int8 static", "fp8 dynamic")])
    assert group.block_bytes == sum(spec.block_bytes for spec in group.specs)
    assert len({spec.block_bytes for spec in group.specs}) == 2


def test_static_factors_take_no_bytes_of_a_block() -> None:
    specs = {
        granularity: KVCacheSpec(
            layer_idx=0,
            block_size=16,
            num_kv_heads=2,
            head_size=64,
            value_size=64,
            k_format=TensorFormat("int8", FORMATS["int8 static"][0].code, static=granularity),
            v_format=FORMATS["int8 static"][0],
        ).block_bytes
        for granularity in (None, *Granularity)
    }
    assert len(set(specs.values())) == 1
