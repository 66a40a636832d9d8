"""Loading: what comes back, and one sentence for everything that can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tightkv.config import ModelConfig
from tightkv.errors import CheckpointError, ConfigError, TightKVError, UnsupportedModelError
from tightkv.models.compatibility import quiet_transformers
from tightkv.models.linear import JoinedPart, PackedLinear
from tightkv.models.loader import LoadedModel, load_model
from tiny_models import BOS, EOS, VOCAB_SIZE, save_tiny_model, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
Change = Callable[[Path], object]


def load(path: Path | str, **options: str) -> LoadedModel:
    return load_model(ModelConfig(model=str(path), **options), CPU)  # type: ignore[arg-type]


def set_config(**settings: object) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))

    return change


def set_weights(edit: Callable[[dict[str, Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return change


def write(name: str, content: str | bytes) -> Change:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def remove(*patterns: str) -> Change:
    def change(folder: Path) -> None:
        for pattern in patterns:
            for file in folder.glob(pattern):
                file.unlink()

    return change


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "model")
    return tmp_path / "model"


def sentence(error: TightKVError) -> str:
    message = str(error)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 700
    return message


def test_loaded_model_says_what_the_engine_asks(good: Path) -> None:
    loaded = load(good)
    assert loaded.name == str(good)
    assert loaded.dtype == loaded.model.dtype == torch.float32
    assert loaded.eos_token_ids == {EOS}
    assert (loaded.max_position, loaded.vocab_size) == (512, VOCAB_SIZE)
    assert loaded.tokenizer.bos_token_id == BOS
    assert loaded.weight_bytes > 300_000
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_cpu_model_is_packed_and_computes_the_same(good: Path) -> None:
    loaded = load(good)
    kinds = {type(module) for module in loaded.model.modules()}
    assert {PackedLinear, JoinedPart} <= kinds
    assert torch.nn.Linear not in kinds
    ids = torch.arange(40)[None]
    expected = tiny_model()(ids, use_cache=False).logits
    got = loaded.model(ids, use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_attention_is_left_eager(good: Path) -> None:
    assert load(good).model.config._attn_implementation == "eager"


def test_dtype_is_honoured_and_packed(good: Path) -> None:
    loaded = load(good, dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    assert any(isinstance(module, PackedLinear) for module in loaded.model.modules())


def test_checkpoint_in_half_precision_becomes_float32_on_a_cpu(tmp_path: Path) -> None:
    with quiet_transformers():
        model: Any = tiny_model()
        model.to(torch.bfloat16).save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load(tmp_path).dtype == torch.float32


def test_eos_ids_are_joined_from_both_configs(folder: Path) -> None:
    write("generation_config.json", '{"eos_token_id": [3, 4]}')(folder)
    assert load(folder).eos_token_ids == {3, 4, EOS}


def test_chat_template_and_tokenizer_can_be_replaced(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("<{{ messages[0]['content'] }}>")
    with quiet_transformers():
        tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    remove("tokenizer*")(folder)
    loaded = load(folder, tokenizer=str(tmp_path / "tokenizer"), chat_template=str(file))
    text = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<hi>"


def test_template_that_refuses_a_message_is_still_a_template(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ raise_exception('only tools') }}")
    assert load(folder, chat_template=str(file)).tokenizer.chat_template == file.read_text()


BROKEN: dict[str, tuple[Change, str]] = {
    "config missing": (remove("config.json"), "no config.json"),
    "config no json": (write("config.json", "{"), "config.json is not valid JSON"),
    "unknown type": (set_config(model_type="nosuch"), "nosuch"),
    "wrong value": (set_config(hidden_size=63), "63"),
    "generation config": (write("generation_config.json", "{"), "generation_config.json"),
    "truncated": (truncate, "not fully covered"),
    "no safetensors": (write("model.safetensors", b"x" * 99), "header too large"),
    "pickle": (pickle, "convert them to safetensors"),
    "no weights": (remove("*.safetensors"), "no weights"),
    "missing weight": (
        set_weights(lambda w: w.pop("model.layers.1.mlp.up_proj.weight")),
        "1 missing, as model.layers.1.mlp.up_proj.weight",
    ),
    "surplus weight": (
        set_weights(lambda w: w.update(surplus=torch.zeros(3))),
        "1 without a place, as surplus",
    ),
    "wrong shape": (
        set_weights(lambda w: w.update({"model.norm.weight": torch.zeros(3)})),
        "1 of another shape, as model.norm.weight",
    ),
    "more layers": (set_config(num_hidden_layers=3), "9 missing, as model.layers.2."),
    "no tokenizer": (remove("tokenizer*"), "tokenizer"),
    "empty tokenizer": (write("tokenizer.json", "{}"), "tokenizer"),
    "tokenizer no json": (write("tokenizer.json", "{"), "tokenizer.json"),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_broken_folder_is_one_sentence(folder: Path, case: str) -> None:
    change, words = BROKEN[case]
    change(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert words in sentence(caught.value)
    assert str(folder) in str(caught.value)


def test_empty_tokenizer_of_transformers_is_refused(tmp_path: Path) -> None:
    remove("tokenizer*")(save_tiny_model(tmp_path, "qwen2"))
    with pytest.raises(CheckpointError, match="no tokenizer files"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "./a/b", "a/b/c", "~nobody/x", "a b"])
def test_no_such_folder(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(name)
    assert name in sentence(caught.value)


def test_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as caught:
        load("nobody/nothing")
    assert "'nobody/nothing'" in sentence(caught.value)


def test_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="not GGUF"):
        load(tmp_path / "model.bin")


def test_settings_that_contradict_or_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{% for x %}")
    wrong: list[dict[str, str]] = [
        {"revision": "main"},
        {"chat_template": "/no/such/file"},
        {"chat_template": str(tmp_path / "bad.jinja")},
        {"dtype": "int3"},
    ]
    for options in wrong:
        with pytest.raises(ConfigError) as caught:
            load(folder, **options)
        assert next(iter(options.values())) in sentence(caught.value)
    with pytest.raises(ConfigError, match="No model was given"):
        load("")


def test_code_of_the_model_needs_consent(folder: Path) -> None:
    classes = {"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"}
    set_config(model_type="zzz", auto_map=classes)(folder)
    with pytest.raises(ConfigError, match="--trust-remote-code") as caught:
        load(folder)
    sentence(caught.value)


def test_unsupported_model_is_refused_before_its_weights(folder: Path) -> None:
    set_config(model_type="diffllama")(folder)
    truncate(folder)
    with pytest.raises(UnsupportedModelError, match="diffllama"):
        load(folder)
