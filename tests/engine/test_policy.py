"""How formats and scales of each layer are decided, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tightkv import LLM, LayerScales, TensorScale, TightKVError, get_kv_cache_scales
from tightkv.errors import CheckpointError, ConfigError, ScaleError
from tightkv.kvcache import KVCacheSpec
from tiny_engine import loaded
from tiny_models import save_tiny_model

TEXTS = ["The lighthouse stood on the rock, and the sea went round it all night long. " * 8]
POOL = {"kv_cache_memory_bytes": 1 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "gemma", "gemma3_text")


@pytest.fixture(scope="module")
def scales(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scales") / "scales.json"
    get_kv_cache_scales(loaded(folder), TEXTS, path, num_samples=4, max_seq_len=64)
    return path


def specs(llm: LLM) -> list[KVCacheSpec]:
    return [spec for group in llm.engine.storage.groups for spec in group.specs]


def edited(scales: Path, tmp_path: Path, change: Any) -> Path:
    document = json.loads(scales.read_text())
    change(document)
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(document))
    return path


def refused(kind: type[TightKVError], model: object, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        LLM(str(model), **{**POOL, **options})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_file_decides_alone(folder: Path, scales: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tightkv")
    llm = LLM(str(folder), quantization_config_path=str(scales), **POOL)
    for spec in specs(llm):
        described = "int8 (static per channel, dynamic per token and head)"
        assert (spec.k_format.describe(), spec.v_format.describe()) == (described, described)
    assert "Source of formats and scales: layers 0-1: scales.json" in caplog.text
    assert llm.engine.config.cache.kv_cache_dtype == "int8"
    same = LLM(str(folder), quantization_config_path=str(scales), kv_cache_dtype="int8", **POOL)
    assert same.engine.storage.fingerprint() == llm.engine.storage.fingerprint()


def test_a_file_may_mix_formats(folder: Path, scales: Path, tmp_path: Path) -> None:
    def mix(document: Any) -> None:
        document["layers"]["0"]["k"] = {"format": "float16"}
        document["layers"]["0"]["v"] = {"format": "fp8_per_token_head"}

    llm = LLM(str(folder), quantization_config_path=str(edited(scales, tmp_path, mix)), **POOL)
    first, second = specs(llm)
    assert (first.k_format.name, first.v_format.name) == ("float16", "fp8_per_token_head")
    assert (second.k_format.name, second.v_format.name) == ("int8", "int8")
    assert llm.generate([[1, 2, 3]])[0].error is None


def test_a_skipped_layer_wins_over_the_file(
    folder: Path, scales: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tightkv")
    llm = LLM(
        str(folder),
        quantization_config_path=str(scales),
        kv_cache_dtype_skip_layers=("-1",),
        **POOL,
    )
    assert [spec.k_format.name for spec in specs(llm)] == ["int8", "float32"]
    assert "layers 0: scales.json; layers 1: kv_cache_dtype_skip_layers" in caplog.text


def test_a_flag_may_not_contradict_the_file(folder: Path, scales: Path) -> None:
    text = refused(ConfigError, folder, quantization_config_path=str(scales), kv_cache_dtype="fp8")
    assert "layers.0.k.format is 'int8', but the flags ask for 'fp8'" in text
    text = refused(
        ConfigError, folder, quantization_config_path=str(scales), v_cache_dtype="float16"
    )
    assert "layers.0.v.format" in text
    given = {0: LayerScales(TensorScale(torch.tensor(1.0)))}
    text = refused(ConfigError, folder, quantization_config_path=str(scales), kv_cache_scales=given)
    assert "give one" in text


def test_a_file_of_another_model_of_the_same_shape(
    folder: Path, scales: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save_tiny_model(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    first = sorted(weights)[0]
    weights[first] = weights[first] + 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr("tightkv.models.loader._load_weights", _must_not_run)
    text = refused(ScaleError, other, quantization_config_path=str(scales))
    assert "model.weights" in text
    assert "another model" in text


def _must_not_run(*_: object) -> None:
    raise AssertionError("the weights were loaded")


def _move(document: Any) -> None:
    document["layers"]["2"] = document["layers"].pop("1")


def _halve(document: Any) -> None:
    for layer in document["layers"].values():
        layer["head_size"] = 8
        layer["k"]["scale"] = [row[:8] for row in layer["k"]["scale"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_move, "has 2, but the model stores K and V in layers 0-1"),
        (_halve, "K of layer 0 (edited.json)"),
        (lambda d: d["layers"]["1"]["v"].update(scale=[[0.0] * 16] * 2), "layers.1.v: "),
        (lambda d: d["model"].update(architecture="Other"), "model.architecture is 'Other'"),
        (lambda d: d.pop("model"), "model"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_weights_load(
    folder: Path,
    scales: Path,
    tmp_path: Path,
    change: Any,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = edited(scales, tmp_path, change)
    monkeypatch.setattr("tightkv.models.loader._load_weights", _must_not_run)
    text = refused(ScaleError, folder, quantization_config_path=str(path))
    assert words in text
    assert "edited.json" in text


def test_skipped_layers_by_range_and_kind(folder: Path, gemma: Path) -> None:
    def kept(model: Path, *entries: str) -> list[int]:
        llm = LLM(str(model), kv_cache_dtype="int8", kv_cache_dtype_skip_layers=entries, **POOL)
        return sorted(s.layer_idx for s in specs(llm) if s.k_format.name == "float32")

    assert kept(gemma, "0-2") == [0, 1, 2]
    assert kept(gemma, "1", "-1") == [1, 3]
    assert kept(gemma, "sliding_window") == [0, 2]
    for entry, words in (
        ("2-1", "'2-1'"),
        ("1-9999999999", "has 1-9999999999"),
        ("-9", "has -9"),
        ("full", "'full'"),
        ("sliding_window", "no layer with a sliding window"),
    ):
        text = refused(ConfigError, folder, kv_cache_dtype_skip_layers=(entry,))
        assert words in text


def test_the_old_file_of_vllm(folder: Path, tmp_path: Path) -> None:
    def write(model_type: str, ranks: dict[str, Any]) -> str:
        path = tmp_path / "old.json"
        kv_cache = {"dtype": "float8_e4m3fn", "scaling_factor": ranks}
        path.write_text(json.dumps({"model_type": model_type, "kv_cache": kv_cache}))
        return str(path)

    path = write("llama", {"0": {"0": 0.02, "1": 0.03}, "1": {"0": 0.04, "1": 0.05}})
    llm = LLM(str(folder), quantization_config_path=path, **POOL)
    assert [s.k_format.describe() for s in specs(llm)] == ["fp8_e4m3 (static per head)"] * 2
    factors = llm.engine.storage.layer(1).k_scale
    assert factors is not None
    assert factors[:, 0].tolist() == torch.tensor([0.03, 0.05]).tolist()
    assert "lacks 1" in refused(
        ScaleError, folder, quantization_config_path=write("llama", {"0": {"0": 0.02}})
    )
    text = refused(
        ScaleError, folder, quantization_config_path=write("qwen2", {"0": {"0": 1.0, "1": 1.0}})
    )
    assert "model_type is 'qwen2'" in text


def with_checkpoint_scales(folder: Path, target: Path, scales: dict[str, torch.Tensor]) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(target / "model.safetensors")
    save_file({**weights, **scales}, target / "model.safetensors", {"format": "pt"})
    return target


STYLES = {
    "compressed-tensors": "model.layers.{}.self_attn.{}_scale",
    "ModelOpt": "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
    "fused": "model.layers.{}.self_attn.qkv_proj.{}_scale",
}


@pytest.mark.parametrize("style", STYLES)
def test_scales_of_a_checkpoint(
    folder: Path, tmp_path: Path, style: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tightkv")
    values = {
        STYLES[style].format(layer, tensor): torch.tensor([0.01 * (1 + layer)])
        for layer in range(2)
        for tensor in "kv"
    }
    model = with_checkpoint_scales(folder, tmp_path, values)
    used = LLM(str(model), kv_cache_dtype="fp8", **POOL)
    assert [s.v_format.describe() for s in specs(used)] == ["fp8_e4m3 (static per tensor)"] * 2
    factors = used.engine.storage.layer(1).v_scale
    assert factors is not None
    assert float(factors[0, 0]) == pytest.approx(0.02)
    assert "layers 0-1: checkpoint" in caplog.text
    caplog.clear()
    plain = LLM(str(model), **POOL)
    assert {s.v_format.name for s in specs(plain)} == {"float32"}
    assert "fp8_e4m3 scales for layers 0-1, which are not used" in caplog.text


def test_one_scale_for_both_and_scales_per_head(folder: Path, tmp_path: Path) -> None:
    values = {
        "model.layers.0.self_attn.kv_scale": torch.tensor(0.5),
        "model.layers.1.self_attn.k_scale": torch.tensor([0.25, 0.5]).view(2, 1, 1),
        "model.layers.1.self_attn.v_scale": torch.tensor(1.0),
        "model.layers.1.self_attn.q_scale": torch.tensor(1.0),
    }
    model = with_checkpoint_scales(folder, tmp_path, values)
    first, second = specs(LLM(str(model), kv_cache_dtype="fp8", **POOL))
    assert first.k_format.describe() == "fp8_e4m3 (static per tensor)"
    assert second.k_format.describe() == "fp8_e4m3 (static per head)"


def test_a_scheme_of_the_cache_alone(folder: Path, tmp_path: Path) -> None:
    values = {
        f"model.layers.{layer}.self_attn.{tensor}_scale": torch.tensor(0.1)
        for layer in range(2)
        for tensor in "kv"
    }
    model = with_checkpoint_scales(folder, tmp_path, values)
    config = json.loads((model / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}}
    config["quantization_config"] = {**quantization, "kv_cache_scheme": scheme}
    (model / "config.json").write_text(json.dumps(config))
    llm = LLM(str(model), kv_cache_dtype="int8", **POOL)
    assert [s.k_format.describe() for s in specs(llm)] == ["int8 (static per tensor)"] * 2
    scheme["num_bits"] = 4
    (model / "config.json").write_text(json.dumps(config))
    assert "4 bits" in refused(ScaleError, model, kv_cache_dtype="int8")


def test_a_scale_under_an_unknown_name(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mixer.k_scale"
    model = with_checkpoint_scales(folder, tmp_path, {name: torch.tensor(0.1)})
    assert name in refused(CheckpointError, model)


def test_a_checkpoint_that_lacks_a_scale(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.kv_scale"
    model = with_checkpoint_scales(folder, tmp_path, {name: torch.tensor(0.1)})
    assert "none for K of layer 1" in refused(ScaleError, model, kv_cache_dtype="fp8")
    LLM(str(model), **POOL)  # without them nothing is wrong
