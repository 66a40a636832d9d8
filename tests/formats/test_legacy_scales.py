"""vLLM's old file of scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tightkv.errors import ScaleError
from tightkv.formats.legacy_scales import LegacyScales, is_legacy_document

PATH = Path("old.json")


def document(factors: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": factors},
    }


def test_one_rank_is_a_scale_per_tensor() -> None:
    old = document({"0": {"0": 0.25, "1": 0.5}})
    assert is_legacy_document(old)
    policy = LegacyScales.parse(PATH, old).policy("old.json", "old.json", {0: 4, 1: 4})
    for layer, expected in ((0, 0.25), (1, 0.5)):
        for tensor in (policy[layer].k, policy[layer].v):
            assert tensor.kv_cache_dtype == "fp8_e4m3"
            assert tensor.scale is not None
            assert tensor.scale.values.item() == expected
            assert not tensor.scale.dynamic


def test_ranks_are_shares_of_the_heads() -> None:
    old = LegacyScales.parse(PATH, document({"0": {"0": 0.25}, "1": {"0": 0.5}}))
    scale = old.policy("old.json", "old.json", {0: 4})[0].k.scale
    assert scale is not None
    assert scale.values.tolist() == [0.25, 0.25, 0.5, 0.5]
    with pytest.raises(ScaleError, match="2 ranks, which cannot share the 3 KV heads of layer 0"):
        old.policy("old.json", "old.json", {0: 3})


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({}, "scaling_factor"),
        ({"1": {"0": 0.5}}, "ranks from 0 on"),
        ({"0": {"0": 0.5}, "1": {"1": 0.5}}, "the same layers"),
        ({"0": {"x": 0.5}}, "by index"),
        ({"0": {"0": "a"}}, "scaling_factor.0.0"),
        ({"0": {"0": 0.0}}, "layer 0: .* 0.0"),
        ([1], "scaling_factor"),
    ],
)
def test_wrong_files(factors: Any, message: str) -> None:
    with pytest.raises(ScaleError, match=message) as caught:
        LegacyScales.parse(PATH, document(factors)).policy("old.json", "old.json", {0: 2, 1: 2})
    assert "old.json" in str(caught.value)


def test_another_type_of_codes_is_refused() -> None:
    wrong = document({"0": {"0": 0.5}})
    wrong["kv_cache"]["dtype"] = "int8"
    with pytest.raises(ScaleError, match=r"kv_cache\.dtype"):
        LegacyScales.parse(PATH, wrong)
