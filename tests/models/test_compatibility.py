"""What is refused, by name and with the reason, before any weight is read."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from tightkv.errors import CheckpointError, UnsupportedModelError
from tightkv.models.compatibility import (
    check_checkpoint_folder,
    check_model,
    one_line,
    quiet_transformers,
)
from tiny_models import SPECIFIC, tiny_model

REFUSED: dict[str, str] = {
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "bert": "it is an encoder",
    "gemma3": "vision_config",
    "whisper": "encoder-decoder",
    "llama4_text": "chunked_attention",
    "mamba": "linear_attention",
    "rwkv": "recurrent",
    "jamba": "linear_attention",
    "qwen3_next": "linear_attention",
    "recurrent_gemma": "linear_attention",
    "lfm3": "conv",
    "deepseek_v32": "indexed_attention",
    "diffllama": "twice",
    "doge": "mask of its own",
    "falcon": "FalconForCausalLM",
    "bloom": "BloomForCausalLM",
    "mpt": "MptForCausalLM",
}


def refusal(config: PreTrainedConfig) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        check_model(config)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert config.model_type in message
    return message


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refused_with_the_reason(model_type: str) -> None:
    with quiet_transformers():
        config = AutoConfig.for_model(model_type)
    assert REFUSED[model_type] in refusal(config)


@pytest.mark.parametrize("model_type", sorted(SPECIFIC))
def test_served(model_type: str) -> None:
    check_model(tiny_model(model_type, num_hidden_layers=2, **_two_layers(model_type)).config)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3", "stablelm"])
def test_other_kinds_are_served(model_type: str) -> None:
    check_model(AutoConfig.for_model(model_type))


def test_dynamic_rope_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "'dynamic'" in refusal(AutoConfig.for_model("llama", rope_parameters=rope))


def test_rope_of_one_layer_type_is_refused() -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    rope = {"full_attention": dynamic, "sliding_attention": plain}
    config = AutoConfig.for_model("gemma3_text")
    config.rope_parameters = rope
    assert "'dynamic'" in refusal(config)


@pytest.mark.parametrize(("longest", "served"), [(4096, True), (4097, False)])
def test_longrope_is_served_up_to_its_original_length(longest: int, served: bool) -> None:
    factors = [1.0] * 48
    rope = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    config = AutoConfig.for_model(
        "phi3",
        rope_parameters={**rope, "rope_type": "longrope", "rope_theta": 10000.0},
        original_max_position_embeddings=4096,
        max_position_embeddings=longest,
    )
    if served:
        check_model(config)
    else:
        assert "'longrope'" in refusal(config)


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_fixed_rope_scaling_is_served(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type == "yarn":
        rope["original_max_position_embeddings"] = 2048
    check_model(AutoConfig.for_model("llama", rope_parameters=rope))


@pytest.mark.parametrize("method", ["gptq", "no_such_method"])
def test_quantized_weights_that_cannot_be_loaded_are_refused(method: str) -> None:
    config = AutoConfig.for_model("llama")
    config.quantization_config = {"quant_method": method, "bits": 4}
    assert method in refusal(config)


def _folder(path: Path, **settings: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **settings}))
    return path


def test_plain_folder_is_accepted(tmp_path: Path) -> None:
    check_checkpoint_folder(_folder(tmp_path))


def test_adapter_folder_is_refused_by_name(tmp_path: Path) -> None:
    (_folder(tmp_path) / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="LoRA adapter"):
        check_checkpoint_folder(tmp_path)


def test_quantized_folder_is_refused_by_name(tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(UnsupportedModelError, match="'gptq'"):
        check_checkpoint_folder(_folder(tmp_path, quantization_config=quantization))


def test_folder_of_gguf_files_says_which_path_to_give(tmp_path: Path) -> None:
    (tmp_path / "model.Q4.gguf").touch()
    with pytest.raises(CheckpointError, match=r"model\.Q4\.gguf"):
        check_checkpoint_folder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\ud800"])
def test_files_that_are_not_json_are_named(tmp_path: Path, name: str, content: str) -> None:
    (_folder(tmp_path) / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=name) as caught:
        check_checkpoint_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_one_line() -> None:
    assert one_line(ValueError("First\n  thing. Second thing.")) == "First thing"
    assert one_line(KeyError("name")) == "KeyError 'name'"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 1000))) == 240


def test_quiet_transformers_restores_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    before: Any = transformers_logging
    state = before.get_verbosity(), before.is_progress_bar_enabled()
    with caplog.at_level(logging.DEBUG, logger="tightkv"), quiet_transformers():
        assert not before.is_progress_bar_enabled()
        warnings.warn("a foreign warning", stacklevel=1)
    assert "a foreign warning" in caplog.text
    assert state == (before.get_verbosity(), before.is_progress_bar_enabled())


def _two_layers(model_type: str) -> dict[str, Any]:
    types = SPECIFIC[model_type].get("layer_types")
    return {} if types is None else {"layer_types": types[:2]}
