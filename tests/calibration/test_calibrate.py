"""From text to a file that is really used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outliers import inject_outliers
from tightkv import LLM, LayerScales, SamplingParams, TensorScale, get_kv_cache_scales
from tightkv.calibration import Calibration, calibrate
from tightkv.errors import ConfigError, OutputError, RequestError
from tightkv.files import cache_folder
from tightkv.formats import KVCachePolicy, read_scales_file
from tightkv.metrics import kl_divergence
from tightkv.models import LoadedModel
from tiny_engine import loaded, logits_by_position, prompts
from tiny_models import save_tiny_model, tiny_model

TEXTS = ["The lighthouse stood on the rock, and the sea went round it all night long. " * 20]
SMALL: dict[str, Any] = {"num_samples": 8, "max_seq_len": 64}
POOL = {"kv_cache_memory_bytes": 1 << 20}
ARCHITECTURES = ("llama", "qwen2", "gemma3_text", "gpt2", "gpt_oss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def logits(model: LoadedModel, **options: Any) -> torch.Tensor:
    """After each position of a prompt."""
    llm = LLM(model, **POOL, **options)
    params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0)
    return torch.stack(list(logits_by_position(llm, prompts(1, 80)[0], params).values()))


def kl(model: LoadedModel, **options: Any) -> float:
    """Mean divergence from the unquantized cache."""
    return float(kl_divergence(logits(model), logits(model, **options)).mean())


def static(policy: KVCachePolicy) -> dict[int, LayerScales]:
    return {layer: LayerScales(of.k.scale, of.v.scale) for layer, of in policy.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_calibrate_then_serve(architecture: str, tmp_path: Path) -> None:
    model = loaded(save_tiny_model(tmp_path / architecture, architecture))
    path = tmp_path / "scales.json"
    content = get_kv_cache_scales(model, TEXTS, path, **SMALL)
    assert read_scales_file(path) == content
    assert content.made_by.num_tokens == 384
    assert content.made_by.num_held_out_tokens == 128
    calibrated = kl(model, quantization_config_path=str(path))
    dynamic = kl(model, kv_cache_dtype="int8_per_token_head")
    assert 0 < calibrated < 2 * dynamic


@pytest.mark.parametrize("granularity", ["tensor", "head", "channel", "auto"])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_static_scales(folder: Path, granularity: str, dtype: str) -> None:
    content = get_kv_cache_scales(
        loaded(folder), TEXTS, static=True, granularity=granularity, kv_cache_dtype=dtype, **SMALL
    )
    entries = [tensor for layer in content.layers.values() for tensor in (layer.k, layer.v)]
    assert not any(entry.dynamic for entry in entries)
    if granularity != "auto":
        assert {entry.granularity for entry in entries} == {granularity}
    assert all(entry.attention_error is not None for entry in entries)
    assert kl(loaded(folder), kv_cache_dtype=dtype, kv_cache_scales=static(content.policy(""))) < 1


@pytest.mark.parametrize("method", ["absmax", "percentile", "mse"])
def test_methods_and_margins(folder: Path, method: Any) -> None:
    options: dict[str, Any] = {"static": True, "granularity": "tensor", "method": method, **SMALL}

    def scale(**more: Any) -> float:
        content = get_kv_cache_scales(loaded(folder), TEXTS, **options, **more)
        value = content.layers["0"].k.scale
        assert isinstance(value, float)
        return value

    assert scale(margin=2.0) == pytest.approx(2 * scale(margin=1.0))
    assert content_options(folder, options)["margin"] is None


def content_options(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    content = get_kv_cache_scales(loaded(folder), TEXTS, **options)
    return {"margin": None, **content.made_by.options}


def test_the_same_text_gives_the_same_file(folder: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        get_kv_cache_scales(loaded(folder), TEXTS, path, **SMALL)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_formats_apart_and_layers_skipped(folder: Path) -> None:
    content = get_kv_cache_scales(
        loaded(folder),
        TEXTS,
        k_cache_dtype="int8",
        v_cache_dtype="fp8_per_token_head",
        kv_cache_dtype_skip_layers=("1",),
        **SMALL,
    )
    first, second = content.layers["0"], content.layers["1"]
    assert (first.k.format, first.v.format) == ("int8", "fp8_per_token_head")
    assert first.v.scale is None
    assert (second.k.format, second.v.format) == ("float32", "float32")


def test_text_of_the_models_own(folder: Path) -> None:
    content = get_kv_cache_scales(loaded(folder), None, **SMALL)
    assert content.made_by.data == ("self",)
    assert content.made_by.num_tokens == 384
    again = get_kv_cache_scales(loaded(folder), None, **SMALL)
    other = get_kv_cache_scales(loaded(folder), None, seed=1, **SMALL)
    assert again == content
    assert other.made_by.data_sha256 != content.made_by.data_sha256


def test_auto_calibrates_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIGHTKV_CACHE_DIR", str(tmp_path))
    llm = LLM(str(folder), quantization_config_path="auto", **POOL)
    (kept,) = cache_folder("scales").iterdir()
    assert llm.engine.config.cache.quantization_config_path == str(kept)

    def must_not_run(*_: object, **__: object) -> None:
        raise AssertionError("calibrated twice")

    monkeypatch.setattr("tightkv.calibration.at_start.get_kv_cache_scales", must_not_run)
    again = LLM(str(folder), quantization_config_path="auto", **POOL)
    assert again.engine.storage.fingerprint() == llm.engine.storage.fingerprint()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "head"}, "belong to static scales"),
        ({"margin": 2.0}, "belong to static scales"),
        ({"static": True, "margin": 0.0}, "margin is 0.0"),
        ({"static": True, "method": "best"}, "Unknown method 'best'"),
        ({"static": True, "granularity": "block"}, "Unknown granularity 'block'"),
        ({"kv_cache_dtype": "int7"}, "int7"),
        ({"kv_cache_dtype": "float16"}, "nothing to calibrate"),
        ({"kv_cache_dtype_skip_layers": ("x",)}, "'x'"),
        ({"kv_cache_dtype_skip_layers": ("7",)}, "has 7"),
    ],
)
def test_options_that_contradict(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_kv_cache_scales(loaded(folder), TEXTS, **{**SMALL, **options})


def test_a_target_that_cannot_be_written_is_said_first(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        get_kv_cache_scales("no such model", TEXTS, tmp_path / "no" / "x.json")


def test_a_model_whose_v_is_zero(folder: Path) -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data.zero_()
    with pytest.raises(RequestError, match="V of layer 0 is zero"):
        get_kv_cache_scales(replace(loaded(folder), model=model), TEXTS, **SMALL)


# ---- the file is really used ----


def test_wrong_scales_change_the_output(folder: Path) -> None:
    model = loaded(folder)
    options: dict[str, Any] = {"static": True, "granularity": "channel", **SMALL}
    scales = static(get_kv_cache_scales(model, TEXTS, **options).policy(""))
    right = logits(model, kv_cache_dtype="int8", kv_cache_scales=scales)
    wrong = {
        "swapped": {layer: LayerScales(of.v, of.k) for layer, of in scales.items()},
        "shifted": {0: scales[1], 1: scales[0]},
        "doubled": {
            layer: LayerScales(_times(of.k, 2), _times(of.v, 2)) for layer, of in scales.items()
        },
    }
    for name, changed in wrong.items():
        served = logits(model, kv_cache_dtype="int8", kv_cache_scales=changed)
        assert float(kl_divergence(right, served).mean()) > 1e-4, name


def test_two_factor_scales_may_be_doubled_but_not_permuted(folder: Path) -> None:
    model = loaded(folder)
    scales = static(get_kv_cache_scales(model, TEXTS, **SMALL).policy(""))

    def served(changed: dict[int, LayerScales]) -> torch.Tensor:
        return logits(model, kv_cache_dtype="int8", kv_cache_scales=changed)

    right = served(scales)
    doubled = {layer: LayerScales(_times(of.k, 2), _times(of.v, 2)) for layer, of in scales.items()}
    assert torch.equal(served(doubled), right), "a power of two moves into the dynamic scale"
    permuted = {layer: LayerScales(_rolled(of.k), of.v) for layer, of in scales.items()}
    assert not torch.equal(served(permuted), right)


def _times(scale: TensorScale | None, factor: float) -> TensorScale:
    assert scale is not None
    return TensorScale(scale.values * factor, scale.dynamic)


def _rolled(scale: TensorScale | None) -> TensorScale:
    assert scale is not None
    return TensorScale(scale.values.roll(1, dims=-1), scale.dynamic)


# ---- outliers ----


@pytest.fixture(scope="module")
def with_outliers(folder: Path) -> dict[float, LoadedModel]:
    """Outliers in the last of three layers, by factor."""
    models = {}
    for factor in (1.0, 30.0, 1500.0):
        model = tiny_model("llama", num_hidden_layers=3)
        inject_outliers(model, [2], factor)
        models[factor] = replace(loaded(folder), model=model)
    return models


def calibrated(model: LoadedModel, **options: Any) -> Calibration:
    return calibrate(model, TEXTS, **{**SMALL, **options})


def test_injection_leaves_the_output(with_outliers: dict[float, LoadedModel]) -> None:
    clean, loud = logits(with_outliers[1.0]), logits(with_outliers[1500.0])
    torch.testing.assert_close(loud, clean, rtol=1e-3, atol=1e-3)


def test_calibration_names_the_layers_with_outliers(
    with_outliers: dict[float, LoadedModel],
) -> None:
    assert calibrated(with_outliers[1.0]).remarks == ()
    for factor in (30.0, 1500.0):
        (remark,) = calibrated(with_outliers[factor]).remarks
        assert remark.startswith("K of layers 2 has outliers")


def test_two_factor_scales_survive_outliers(with_outliers: dict[float, LoadedModel]) -> None:
    clean, loud = with_outliers[1.0], with_outliers[1500.0]
    per_tensor = static(calibrated(loud, static=True, granularity="tensor").file.policy(""))
    two_factor = static(calibrated(loud).file.policy(""))
    baseline = kl(
        clean, kv_cache_dtype="int8", kv_cache_scales=static(calibrated(clean).file.policy(""))
    )
    assert kl(loud, kv_cache_dtype="int8", kv_cache_scales=two_factor) < 3 * baseline
    assert kl(loud, kv_cache_dtype="int8", kv_cache_scales=per_tensor) > 30 * baseline


def test_a_bias_of_k_as_in_qwen2(tmp_path: Path) -> None:
    source = loaded(save_tiny_model(tmp_path / "qwen2", "qwen2"))

    def two_factor(bias: float) -> float:
        model = tiny_model("qwen2")
        projection: Any = model.model.layers[1].self_attn.k_proj
        with torch.no_grad():
            projection.bias[3] = bias * projection.weight.norm(dim=-1).mean()
        biased = replace(source, model=model)
        scales = static(calibrated(biased).file.policy(""))
        return kl(biased, kv_cache_dtype="int8", kv_cache_scales=scales)

    assert two_factor(20.0) < 2 * two_factor(0.0)
