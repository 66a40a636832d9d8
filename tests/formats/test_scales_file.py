"""The scales file: what is written can be read; anything else is one clear error."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tightkv.errors import ScaleError
from tightkv.formats import ScalesFile, TensorPolicy, TensorScale, read_scales_file
from tightkv.formats.scales_file import TensorEntry, write_scales_file

DOCUMENT: dict[str, Any] = {
    "schema_version": 1,
    "model": {"architecture": "LlamaForCausalLM", "num_layers": 2, "weights": "0" * 64},
    "made_by": {
        "tool": "tightkv 0.1.0",
        "method": "two-factor",
        "data": ["text.txt"],
        "data_sha256": "a" * 64,
        "num_tokens": 1024,
        "num_held_out_tokens": 256,
        "options": {"seed": 0},
    },
    "layers": {
        "0": {
            "num_kv_heads": 2,
            "head_size": 2,
            "value_size": 2,
            "k": {
                "format": "int8",
                "granularity": "channel",
                "dynamic": True,
                "scale": [[1.5, 0.25], [0.1, 3.0]],
                "clip_rate": 0.0,
                "attention_error": 0.001,
            },
            "v": {"format": "fp8_e4m3", "granularity": "tensor", "scale": 0.5},
        },
        "1": {
            "num_kv_heads": 2,
            "head_size": 2,
            "value_size": 2,
            "k": {"format": "float16"},
            "v": {"format": "int8", "granularity": "head", "scale": [1, 2.5]},
        },
    },
}


def written(folder: Path, document: object) -> Path:
    path = folder / "scales.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def changed(*place: str | int, to: Any) -> dict[str, Any]:
    """The document with another value, or without the field, at a place."""
    document = copy.deepcopy(DOCUMENT)
    at: Any = document
    for key in place[:-1]:
        at = at[key]
    if to is None:
        del at[place[-1]]
    else:
        at[place[-1]] = to
    return document


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    content = read_scales_file(written(tmp_path, DOCUMENT))
    copy_path = tmp_path / "copy.json"
    write_scales_file(copy_path, content)
    assert read_scales_file(copy_path) == content
    first, second = (content.policy("f")[layer] for layer in (0, 1))
    assert (first.k.kv_cache_dtype, first.v.kv_cache_dtype) == ("int8", "fp8_e4m3")
    assert first.k.scale is not None
    assert first.k.scale.dynamic
    assert first.k.scale.values.tolist() == torch.tensor([[1.5, 0.25], [0.1, 3.0]]).tolist()
    assert second.k.scale is None
    assert second.v.scale is not None
    assert second.v.scale.values.tolist() == [1.0, 2.5]


def test_rows_of_numbers_stand_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    write_scales_file(path, ScalesFile.model_validate(DOCUMENT))
    assert "[ 1.5, 0.25 ]" in path.read_text() or "[1.5, 0.25]" in path.read_text()
    assert path.read_bytes().endswith(b"}\n")


@given(
    st.lists(st.floats(width=32, min_value=2.0**-120, max_value=2.0**120), min_size=1, max_size=40)
)
@settings(max_examples=50)
def test_every_float32_comes_back_bit_for_bit(values: list[float]) -> None:
    scale = TensorScale(torch.tensor([values], dtype=torch.float32))
    entry = TensorEntry.of(TensorPolicy("int8", scale))
    again = TensorEntry.model_validate(json.loads(entry.model_dump_json()))
    policy = again.policy(1, len(values))
    assert policy.scale is not None
    assert torch.equal(policy.scale.values, scale.values)


WRONG: list[tuple[dict[str, Any], str]] = [
    (changed("schema_version", to=2), "schema_version"),
    (changed("schema_version", to=None), "schema_version"),
    (changed("extra", to=1), "extra"),
    (changed("model", "weights", to="xyz"), "model.weights"),
    (changed("model", "num_layers", to=3), "num_layers is 3"),
    (changed("made_by", "num_tokens", to=-1), "made_by.num_tokens"),
    (changed("layers", "01", to=DOCUMENT["layers"]["0"]), "'01'"),
    (changed("layers", "0", "k", "scale", to=[[1.5, 0.25]]), "layers.0.k: .*shape"),
    (changed("layers", "0", "k", "scale", to=[[1.5, 0.25], [0.1]]), "equal length"),
    (changed("layers", "0", "k", "scale", to=[[1.5, 0.25], [0.1, "x"]]), r"scale\[1\]\[1\] is 'x'"),
    (changed("layers", "0", "k", "scale", to=[[1.5, 0.0], [0.1, 3.0]]), "layers.0.k: .* 0.0"),
    (changed("layers", "0", "k", "scale", to=[[1.5, -1.0], [0.1, 3.0]]), "layers.0.k: .* -1.0"),
    (changed("layers", "0", "k", "scale", to=[[1.5, 1e-60], [0.1, 3.0]]), "layers.0.k: .* 0.0"),
    (changed("layers", "0", "k", "scale", to=[[1.5, 1e60], [0.1, 3.0]]), "layers.0.k: .* inf"),
    (changed("layers", "0", "k", "scale", to=[[1.5, 10**400], [0.1, 3.0]]), "too large"),
    (changed("layers", "0", "k", "scale", to=True), "scale is True"),
    (changed("layers", "0", "k", "scale", to={}), "scale is a JSON object"),
    (changed("layers", "0", "k", "scale", to=[]), "no list of numbers"),
    (changed("layers", "0", "k", "scale", to=None), "has no scale"),
    (changed("layers", "0", "k", "granularity", to="head"), "granularity is 'head'"),
    (changed("layers", "0", "k", "granularity", to="block"), "layers.0.k.granularity"),
    (changed("layers", "0", "k", "format", to="int7"), "layers.0.k.format"),
    (changed("layers", "0", "k", "format", to="auto"), "layers.0.k.format"),
    (changed("layers", "0", "k", "format", to="float16"), "takes no static scale"),
    (changed("layers", "1", "k", "dynamic", to=True), "belong to a scale"),
    (changed("layers", "0", "k", "clip_rate", to=1.5), "layers.0.k.clip_rate"),
    (changed("layers", "0", "head_size", to=0), "layers.0.head_size"),
    (changed("layers", "0", "head_size", to="2"), "layers.0.head_size"),
    (changed("layers", "0", "v", to=None), "layers.0.v"),
]


@pytest.mark.parametrize(("document", "message"), WRONG)
def test_a_wrong_file_is_one_sentence_that_names_the_place(
    tmp_path: Path, document: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, document)
    with pytest.raises(ScaleError, match=message) as caught:
        read_scales_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "Infinity"),
        (b"[" * 100_000, "nested too deeply|not valid JSON"),
        (b"1" * 5000, "not valid JSON|dictionary|object"),
        (b"[]", "dictionary|object"),
        (b"null", "dictionary|object"),
    ],
)
def test_what_is_no_scales_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "scales.json"
    path.write_bytes(content)
    with pytest.raises(ScaleError, match=message):
        read_scales_file(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScaleError, match="cannot be read"):
        read_scales_file(tmp_path / "no.json")
    with pytest.raises(ScaleError, match="cannot be read"):
        read_scales_file(tmp_path)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=6)
    | st.sampled_from(["int8", "float16", "channel", "tensor", "0", "1"])
)
JSONS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["k", "v", "scale", "format", "0", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
PLACES = [
    ["schema_version"],
    ["model"],
    ["model", "num_layers"],
    ["made_by", "options"],
    ["made_by", "data"],
    ["layers"],
    ["layers", "0"],
    ["layers", "1", "num_kv_heads"],
    ["layers", "0", "k"],
    ["layers", "0", "k", "scale"],
    ["layers", "0", "k", "granularity"],
    ["layers", "0", "k", "dynamic"],
    ["layers", "1", "v", "format"],
]


@given(st.sampled_from(PLACES), JSONS)
@settings(max_examples=300)
def test_fuzzed_documents(
    tmp_path_factory: pytest.TempPathFactory, place: list[str], value: Any
) -> None:
    document = copy.deepcopy(DOCUMENT)
    at = document
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    _reads_or_refuses(tmp_path_factory.mktemp("fuzz"), json.dumps(document).encode())


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_fuzzed_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    _reads_or_refuses(tmp_path_factory.mktemp("fuzz"), content)


@given(st.integers(0, len(json.dumps(DOCUMENT)) - 1), st.binary(min_size=1, max_size=3))
@settings(max_examples=300)
def test_fuzzed_places_of_a_good_file(
    tmp_path_factory: pytest.TempPathFactory, position: int, piece: bytes
) -> None:
    good = json.dumps(DOCUMENT).encode()
    _reads_or_refuses(
        tmp_path_factory.mktemp("fuzz"), good[:position] + piece + good[position + len(piece) :]
    )


def _reads_or_refuses(folder: Path, content: bytes) -> None:
    path = folder / "scales.json"
    path.write_bytes(content)
    refusal, policy = "", {}
    try:
        policy = dict(read_scales_file(path).policy("fuzz"))
    except ScaleError as error:
        refusal = str(error)
    assert policy or str(path) in refusal
    assert "\n" not in refusal
    for layer in policy.values():
        for tensor in (layer.k, layer.v):
            if tensor.scale is not None:
                values = tensor.scale.values
                assert bool((torch.isfinite(values) & (values > 0)).all())
