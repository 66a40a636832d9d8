"""Packed linear layers: a row's bits never depend on its batch, and nothing stale or lost."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from tightkv.models.linear import (
    JoinedPart,
    JoinedProduct,
    PackedLinear,
    pack_linear_layers,
    weight_bytes,
)
from tiny_models import SPECIFIC, tiny_model

IDS = torch.arange(60)[None] * 7 % 256


def joined(in_features: int = 64, bias: tuple[bool, ...] = (False, False, False)) -> nn.Module:
    """An attention-like module whose q, k, v are parts of one product."""
    torch.manual_seed(3)
    parent = nn.Module()
    for name, width, with_bias in zip("qkv", (64, 32, 32), bias, strict=True):
        parent.add_module(f"{name}_proj", nn.Linear(in_features, width, bias=with_bias))
    return parent


@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (576, 257), (1536, 576)])
def test_row_has_the_same_bits_in_every_batch(in_features: int, out_features: int) -> None:
    torch.manual_seed(0)
    layer = PackedLinear(torch.randn(out_features, in_features), torch.randn(out_features))
    x = torch.randn(700, in_features)
    whole = layer(x)
    for rows in (*range(1, 71), 128, 255, 256, 257, 512, 699):
        assert torch.equal(layer(x[:rows]), whole[:rows]), f"{rows} rows"
        assert torch.equal(layer(x[-rows:][None])[0], whole[-rows:]), f"last {rows} rows"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_have_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*n).to(dtype) for n in ((96, 64), (96,), (300, 64)))
    layer = PackedLinear(weight, bias)
    whole = layer(x)
    assert whole.dtype == dtype == layer.weight.dtype
    for rows in (*range(1, 20), 64, 257):
        assert torch.equal(layer(x[:rows]), whole[:rows]), f"{rows} rows"
    exact = linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), exact, rtol=2**-8, atol=2**-7)


def test_values_of_sixteen_bits_are_kept_in_sixteen() -> None:
    """A float32 weight from a bfloat16 checkpoint: half the bytes, the same bits."""
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64).bfloat16().float(), torch.randn(20, 64)
    other = weight.clone()
    other[3, 3] += 2**-20
    narrow, wide = PackedLinear(weight, None), PackedLinear(other, None)
    assert (narrow.packed.code, wide.packed.code) == ("bfloat16", "float32")
    assert weight_bytes(narrow) * 2 == weight_bytes(wide) == weight.nbytes
    columns = [column for column in range(96) if column != 3]
    assert torch.equal(narrow(x)[:, columns], wide(x)[:, columns])


def test_joined_row_has_the_same_bits_in_every_batch() -> None:
    torch.manual_seed(0)
    product = JoinedProduct([torch.randn(64, 64), torch.randn(32, 64)], [None, None])
    x = torch.randn(256, 64)
    whole = [product.take(part, x).clone() for part in (0, 1)]
    for rows in range(1, 71):
        some = x[:rows]
        for part in (0, 1):
            assert torch.equal(product.take(part, some), whole[part][:rows])


def test_packed_linear_equals_linear_up_to_rounding() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(48, 32), torch.randn(48), torch.randn(2, 5, 32)
    torch.testing.assert_close(PackedLinear(weight, bias)(x), linear(x, weight, bias))
    torch.testing.assert_close(PackedLinear(weight, None)(x), linear(x, weight))


@pytest.mark.parametrize(
    "bias", [(False, False, False), (True, True, True), (True, False, False), (False, True, True)]
)
def test_joined_parts_equal_their_layers(bias: tuple[bool, ...]) -> None:
    plain, packed = joined(bias=bias), joined(bias=bias)
    pack_linear_layers(packed)
    x = torch.randn(1, 9, 64)
    for name, layer in plain.named_children():
        part = packed.get_submodule(name)
        assert isinstance(part, JoinedPart)
        assert isinstance(layer, nn.Linear)
        assert (part.in_features, part.out_features) == (layer.in_features, layer.out_features)
        torch.testing.assert_close(part(x), layer(x))


def test_joined_product_is_computed_once_for_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Tensor] = []
    multiply = JoinedProduct._compute

    def counted(self: JoinedProduct, x: torch.Tensor) -> None:
        calls.append(x)
        multiply(self, x)

    monkeypatch.setattr(JoinedProduct, "_compute", counted)
    module = joined()
    pack_linear_layers(module)
    x = torch.randn(4, 64)
    for name in ("q_proj", "k_proj", "v_proj"):
        module.get_submodule(name)(x)
    assert len(calls) == 1
    module.get_submodule("q_proj")(x)
    assert len(calls) == 2


def test_joined_parts_with_different_inputs_and_orders() -> None:
    plain, packed = joined(), joined()
    pack_linear_layers(packed)
    x, y = torch.randn(4, 64), torch.randn(3, 64)
    same_values = x.clone()
    order = [("k", x), ("q", y), ("q", x), ("q", x), ("v", y), ("v", x), ("v", same_values)]
    for name, value in order:
        layer = plain.get_submodule(f"{name}_proj")
        torch.testing.assert_close(packed.get_submodule(f"{name}_proj")(value), layer(value))


def test_a_new_tensor_in_the_place_of_a_dead_one_is_computed_anew() -> None:
    plain, packed = joined(), joined()
    pack_linear_layers(packed)
    for round_ in range(50):  # ids and memory of dead tensors are used again at once
        x = torch.full((2, 64), round_ / 50)
        packed.get_submodule("q_proj")(x)
        del x
        y = torch.full((2, 64), -round_ / 50 - 1)
        torch.testing.assert_close(
            packed.get_submodule("k_proj")(y), plain.get_submodule("k_proj")(y)
        )


def test_joined_product_keeps_nothing_alive() -> None:
    product = JoinedProduct([torch.randn(8, 4), torch.randn(8, 4)], [None, None])
    x = torch.randn(3, 4)
    product.take(0, x)
    assert product._waiting
    product.take(1, x)
    assert not product._waiting
    product.take(0, x)
    alive = weakref.ref(x)
    del x
    assert alive() is None, "the input is held"
    assert not product._waiting, "the result of a dead input is held"


def test_plain_weights_are_released() -> None:
    model = tiny_model("llama")
    layer = model.get_submodule("model.layers.0")
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    weights = [weakref.ref(layer.get_submodule(name).weight) for name in names]
    pack_linear_layers(model)
    gc.collect()
    assert [ref() for ref in weights] == [None] * len(names)


def test_tied_embedding_stays_plain_and_head_is_packed() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    before = weight_bytes(model)
    pack_linear_layers(model)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    assert isinstance(model.get_submodule("lm_head"), PackedLinear)
    assert weight_bytes(model) >= before + 260 * 64 * 4


def test_weight_bytes_counts_a_joined_product_once() -> None:
    module = joined(bias=(True, True, True))
    before = weight_bytes(module)
    pack_linear_layers(module)
    assert before == weight_bytes(module) == (64 + 1) * (64 + 32 + 32) * 4


@pytest.mark.parametrize("model_type", sorted(SPECIFIC))
def test_packed_model_gives_the_logits_of_the_plain_one(model_type: str) -> None:
    plain, packed = tiny_model(model_type), tiny_model(model_type)
    pack_linear_layers(packed)
    left = [type(m).__name__ for m in packed.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    assert left == []
    with torch.inference_mode():
        expected, got = plain(IDS, use_cache=False).logits, packed(IDS, use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_reading_the_weight_of_a_packed_layer_gives_facts_and_no_numbers() -> None:
    module = joined()
    pack_linear_layers(module)
    for layer in (module.get_submodule("k_proj"), PackedLinear(torch.randn(32, 64), None)):
        weight: Any = layer.weight
        assert (weight.dtype, weight.shape) == (torch.float32, (32, 64))
        assert weight.device == torch.device("cpu")
        with pytest.raises(TypeError):
            linear(torch.randn(1, 64), weight)


class ReadsWeights(nn.Module):
    """Uses the weight of one layer as a tensor, and the dtype of another."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.k_proj = nn.Linear(8, 8)
        self.v_proj = nn.Linear(8, 8)
        self.router = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x.to(self.q_proj.weight.dtype))
        return linear(q + self.k_proj(x) + self.v_proj(x), self.router.weight)


def test_layer_whose_weight_is_used_as_a_tensor_stays_plain() -> None:
    module: Any = ReadsWeights()
    x = torch.randn(3, 8)
    expected = module(x)
    pack_linear_layers(module)
    assert isinstance(module.q_proj, JoinedPart)
    assert type(module.router) is nn.Linear
    torch.testing.assert_close(module(x), expected)


def test_layers_of_another_dtype_stay_plain() -> None:
    module = nn.Sequential(nn.Linear(8, 8).double(), nn.Linear(8, 8))
    pack_linear_layers(module)
    assert [type(layer) for layer in module] == [nn.Linear, PackedLinear]
