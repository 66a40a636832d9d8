"""The fused decoder layer against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tightkv.models import AttentionCall, attend_with, fuse_decoder_layers, use_paged_attention
from tightkv.models.decoder_layer import FusedDecoderLayer
from tightkv.models.linear import pack_linear_layers
from tiny_models import SPECIFIC, tiny_model

SHARED = ("llama", "mistral", "qwen2", "qwen3")


def causal(call: AttentionCall) -> torch.Tensor:
    """Attention of one sequence, window included."""
    position = torch.arange(len(call.query))
    seen = position[:, None] >= position
    if call.params.sliding_window is not None:
        seen &= position[:, None] - position < call.params.sliding_window
    query, key, value = (x.transpose(0, 1) for x in (call.query, call.key, call.value))
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, seen, scale=call.params.softmax_scale, enable_gqa=True
    )
    return out.transpose(0, 1)


def fused(model: PreTrainedModel) -> list[FusedDecoderLayer]:
    return [module for module in model.modules() if isinstance(module, FusedDecoderLayer)]


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    pack_linear_layers(model)
    use_paged_attention(model)
    return model


def logits(model: PreTrainedModel, num_tokens: int = 40) -> torch.Tensor:
    ids = torch.randint(0, 64, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(num_tokens)[None]
    with torch.inference_mode(), attend_with(causal):
        output: Any = model(input_ids=ids, position_ids=positions, use_cache=False)
    return output.logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SHARED)
def test_same_numbers_as_transformers(name: str) -> None:
    own, ours = prepared(tiny_model(name)), prepared(tiny_model(name))
    fuse_decoder_layers(ours)
    assert len(fused(ours)) == own.config.num_hidden_layers
    torch.testing.assert_close(logits(ours), logits(own), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(set(SPECIFIC) - set(SHARED)))
def test_other_layers_stay(name: str) -> None:
    model = prepared(tiny_model(name))
    fuse_decoder_layers(model)
    assert not fused(model)


def test_another_activation_stays() -> None:
    model = prepared(tiny_model("llama", hidden_act="gelu"))
    fuse_decoder_layers(model)
    assert not fused(model)


def test_plain_products_and_other_types_stay() -> None:
    """Without packed weights, as on a GPU, or in 16 bits, the layer is transformers'."""
    narrow: Any = tiny_model("llama")
    for model in (tiny_model("llama"), prepared(narrow.to(torch.bfloat16))):
        fuse_decoder_layers(model)
        assert not fused(model)


def test_names_of_layers_stay() -> None:
    model = prepared(tiny_model("qwen3"))
    before = {name for name, _ in model.named_modules()}
    fuse_decoder_layers(model)
    assert {name for name, _ in model.named_modules()} == before
