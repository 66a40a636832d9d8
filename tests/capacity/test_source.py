"""Where a model's facts come from, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from model_configs import CONFIGS
from tightkv import plan
from tightkv.capacity import source
from tightkv.errors import CheckpointError, ConfigError, ScaleError, UnsupportedModelError
from tightkv.planning import CapacityPlan
from tiny_models import save_tiny_model

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
}


def written(folder: Path, without: str = "", **changes: Any) -> str:
    content = {key: value for key, value in {**SMALL, **changes}.items() if key != without}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def planned(model: str, hardware: str = "l4", **options: Any) -> CapacityPlan:
    return plan(model, hardware=hardware, **options)


def weights(result: CapacityPlan) -> tuple[str, int]:
    return result.model.weight_source, result.model.weight_bytes


def test_a_folder_and_its_config_are_the_same(tmp_path: Path) -> None:
    folder = written(tmp_path)
    assert planned(folder).formats == planned(f"{folder}/config.json").formats


def test_sizes_of_the_files(tmp_path: Path) -> None:
    """Counted from the config, then from the index, then from the files' headers."""
    folder = written(tmp_path)
    where, counted = weights(planned(folder))
    assert where == "config"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 123_456_789}}))
    assert weights(planned(folder)) == ("files", 123_456_789)
    assert weights(planned(folder, weight_bytes=5 * 10**9)) == ("given", 5 * 10**9)
    index.unlink()
    save_file({"weight": torch.zeros(250)}, tmp_path / "model.safetensors")
    assert weights(planned(folder)) == ("files", 1000)
    # Served in another type than stored: counted.
    assert weights(planned(folder, dtype="float32")) == ("config", 2 * counted)
    (tmp_path / "model.safetensors").write_bytes(bytes(20))
    with pytest.raises(CheckpointError, match="safetensors"):
        planned(folder)


def test_what_the_config_says_is_counted_like_the_file(tmp_path: Path) -> None:
    """A float32 checkpoint is served in 16 bits by vLLM, and in float32 here."""
    folder = str(save_tiny_model(tmp_path, "llama"))
    on_gpu, here = planned(folder), planned(folder, hardware="host", max_model_len=64)
    assert on_gpu.model.dtype == "float16"
    assert on_gpu.model.weight_bytes == 2 * on_gpu.model.num_parameters
    assert here.model.dtype == "float32"


def test_a_hub_id_needs_its_config_and_the_index_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path)
    index = tmp_path / "some.json"
    index.write_text(json.dumps({"metadata": {"total_size": 123_456_789}}))
    asked: list[str] = []

    def download(model: str, name: str, revision: str | None) -> str:
        asked.append(name)
        return str(index)

    real = AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda model, revision: real(folder))
    monkeypatch.setattr(
        "transformers.LlamaConfig.get_config_dict", lambda model, revision: (SMALL, {})
    )
    monkeypatch.setattr(source, "hf_hub_download", download)
    result = planned("someone/some-model", revision="main")
    assert asked == ["model.safetensors.index.json"]
    assert weights(result) == ("files", 123_456_789)
    assert result.model.name == "someone/some-model"


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
)
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    """transformers would take a default, and the plan would be of another model."""
    with pytest.raises(CheckpointError, match=key):
        planned(written(tmp_path, without=key))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3_next"}, "linear_attention"),
        ({"model_type": "mamba"}, "linear_attention"),
        ({"model_type": "llama4_text"}, "chunked_attention"),
        ({"model_type": "bert"}, "encoder"),
        ({"model_type": "diffllama"}, "twice"),
    ],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else "",
)
def test_a_cache_that_is_not_known_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        planned(written(tmp_path, **changes))


def test_files_that_are_no_model(tmp_path: Path) -> None:
    for model, words in (
        ("/no/such/folder", "no hub id"),
        (str(tmp_path), "config.json"),
        (str(tmp_path / "x.gguf"), "no GGUF file"),
        ("", "No model"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=words):
            planned(model)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="JSON"):
        planned(str(tmp_path))
    (tmp_path / "x.gguf").write_text("no")
    with pytest.raises(CheckpointError, match="GGUF"):
        planned(str(tmp_path / "x.gguf"))


def test_settings_that_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)
    for options, words in (
        ({"tensor_parallel_size": 3}, "does not divide"),
        ({"num_gpus": 3, "tensor_parallel_size": 2}, "no multiple"),
        ({"hardware": "host", "num_gpus": 2}, "one device"),
        ({"hardware": "host", "max_model_len": 513}, "512 positions"),
        ({"typical_len": 100, "max_model_len": 64}, "shorten it"),
        ({"concurrency": 0}, "at least 1"),
        ({"kv_cache_dtypes": ()}, "at least one"),
        ({"kv_cache_dtypes": ("int3",)}, "give one of auto"),
        ({"kv_cache_dtypes": ("int8/int3",)}, "give one of auto"),
        ({"block_size": 8}, "multiple of 16"),
        ({"gpu_memory_utilization": 1.5}, "at most 1"),
        ({"dtype": "int8"}, "Unknown dtype"),
        ({"kv_cache_dtype_skip_layers": ("7",)}, "layers with a cache"),
    ):
        with pytest.raises(ConfigError, match=words):
            planned(folder, **options)
    with pytest.raises(ScaleError, match="cannot be read"):
        planned(folder, kv_cache_dtypes=("auto@/no/scales.json",))


def test_tightkv_refuses_here_what_it_would_not_serve(tmp_path: Path) -> None:
    """Rotary scaling does not change the cache, so that other engines can be planned."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = written(tmp_path, rope_scaling=rope)
    result = planned(folder)
    assert "note_not_served" in {note.key for note in result.notes}
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        planned(folder, hardware="host")


def test_unknown_bits_ask_for_the_bytes(tmp_path: Path) -> None:
    folder = written(tmp_path, quantization_config={"quant_method": "hqq"})
    with pytest.raises(ConfigError, match="--weight-bytes"):
        planned(folder)
    assert planned(folder, weight_bytes=10**9).fits


def test_latents_take_one_format_alone(tmp_path: Path) -> None:
    content = CONFIGS["DeepSeek-V3"].as_json() | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="one latent"):
        planned(str(tmp_path), kv_cache_dtypes=("int8/fp8",))
    with pytest.raises(ConfigError, match="latents"):
        planned(str(tmp_path), kv_cache_dtype_skip_layers=("0",))


def test_windows_on_this_machine_are_kept_whole(tmp_path: Path) -> None:
    folder = str(save_tiny_model(tmp_path, "mistral"))
    options: dict[str, Any] = {"kv_cache_dtypes": ("float16",), "max_model_len": 512}
    here = planned(folder, hardware="host", **options).formats[0]
    elsewhere = planned(folder, **options).formats[0]
    assert here.request_bytes == 32 * here.bytes_per_block
    # A window of 8 tokens lies in at most 2 blocks of 16.
    assert elsewhere.request_bytes == 2 * elsewhere.bytes_per_block
