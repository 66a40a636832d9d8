"""Twelve public models: bytes per token as computed by hand in `model_configs`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_configs import CONFIGS
from tightkv import plan
from tightkv.planning import CapacityPlan


def planned(folder: Path, name: str, **options: object) -> CapacityPlan:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name].as_json()))
    settings = {"hardware": "custom:4000GiB", "kv_cache_dtypes": ("auto",), **options}
    return plan(str(folder), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_per_token_and_parameters(name: str, tmp_path: Path) -> None:
    model = CONFIGS[name]
    result = planned(tmp_path, name)
    assert result.formats[0].bytes_per_token == model.kv_bytes
    assert result.model.num_parameters / 1e9 == pytest.approx(model.billions, rel=0.02)
    if not model.config.get("quantization_config"):
        assert result.model.weight_bytes == 2 * result.model.num_parameters


def test_a_sequence_of_llama_3_70b_is_2_5_gib(tmp_path: Path) -> None:
    result = planned(tmp_path, "Llama-3-70B", max_model_len=8192)
    assert result.formats[0].request_bytes == 5 * 2**29


@pytest.mark.parametrize("name", CONFIGS)
def test_results_of_a_step_are_of_the_size_of_the_layers(name: str, tmp_path: Path) -> None:
    """A hundred hidden states at most; Llama-3-8B: 110 kB a token by vLLM's profile (#10517)."""
    size = 2 * 8192
    one, two = (
        planned(tmp_path, name, max_num_batched_tokens=tokens, max_num_seqs=1).waterfall[3].size
        for tokens in (size // 2, size)
    )
    per_token = (two.best - one.best) / (size // 2)
    hidden = (CONFIGS[name].text or CONFIGS[name].config)["hidden_size"]
    assert 8 * 2 * hidden < per_token < 100 * 2 * hidden
    if name == "Llama-3-8B":
        assert per_token == pytest.approx(110_000, rel=0.1)


def test_windows_stop_growing(tmp_path: Path) -> None:
    """Gemma 3: 10 full layers go on, 52 keep 1,024 tokens and one block more."""
    layer = 2 * 16 * 128 * 2
    result = planned(tmp_path, "Gemma-3-27B", max_model_len=131072)
    assert result.formats[0].request_bytes == layer * (10 * 131072 + 52 * (1024 + 16))
    kinds = {kind.kind: kind.num_layers for kind in result.formats[0].layers}
    assert kinds == {"full": 10, "window": 52}
    assert result.model.name
    assert "note_parts" in {note.key for note in result.notes}


def test_latents_are_told_from_expanded_keys_and_values(tmp_path: Path) -> None:
    """61 layers of 128 heads with 192 + 128 channels, against 576 values."""
    result = planned(tmp_path, "DeepSeek-V3", tensor_parallel_size=8)
    note = next(note for note in result.notes if note.key == "note_latent")
    assert note.values["expanded"] == 61 * 128 * (192 + 128)
    assert note.values["stored"] == 61 * 576
    assert result.formats[0].bytes_per_token == 70_272  # each device has all of it
    assert result.formats[0].layers[0].kind == "latent"
    assert "note_latent_copies" in {note.key for note in result.notes}


def test_quantized_weights_are_estimated(tmp_path: Path) -> None:
    """671 billion parameters of 8 bits, embeddings of 16; experts of gpt-oss have 4.25."""
    deepseek = planned(tmp_path, "DeepSeek-V3")
    assert deepseek.model.weight_bytes / 1e9 == pytest.approx(673, rel=0.02)
    weights = next(term.size for term in deepseek.waterfall if term.key == "weights")
    assert weights.low < weights.best < weights.high
    # The files of openai/gpt-oss-20b have 13.8 GB.
    oss = planned(tmp_path, "gpt-oss-20b")
    assert oss.model.weight_bytes / 1e9 == pytest.approx(13.8, rel=0.1)


@pytest.mark.parametrize(
    ("size", "held"), [(1, 8), (2, 4), (8, 1), (16, 1)], ids=["1", "2", "8", "16"]
)
def test_kv_heads_on_each_device(size: int, held: int, tmp_path: Path) -> None:
    """More devices than KV heads hold copies."""
    result = planned(tmp_path, "Llama-3-70B", tensor_parallel_size=size)
    assert result.formats[0].bytes_per_token == 327_680 * held // 8
    assert ("note_copies" in {note.key for note in result.notes}) == (size == 16)


def test_weights_under_tensor_parallelism(tmp_path: Path) -> None:
    """Norms are whole on each device, and k_proj and v_proj too with 16 devices: by hand."""
    hidden, kv_width = 8192, 1024
    matrices = 80 * (2 * hidden * hidden + 3 * hidden * 28672) + 2 * 128256 * hidden
    norms = (2 * 80 + 1) * hidden
    kv = 80 * 2 * hidden * kv_width
    for size, kv_share in ((4, 1 / 4), (16, 1 / 8)):
        weights = planned(tmp_path, "Llama-3-70B", tensor_parallel_size=size).waterfall[2].size
        assert weights.best == pytest.approx(
            2 * (matrices / size + kv * kv_share + norms), rel=1e-9
        )
        assert weights.low <= weights.best <= weights.high
