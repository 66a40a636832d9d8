"""Flags and configuration files of `tightkv serve`; the server itself is not started."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from tightkv.cli import serve
from tightkv.cli.main import main
from tightkv.config import EngineConfig, ServerConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """What the server would have been started with."""
    calls: list[tuple[EngineConfig, ServerConfig]] = []

    def run(config: EngineConfig, server: ServerConfig) -> int:
        calls.append((config, server))
        return 0

    monkeypatch.setattr(serve, "run_server", run)
    return calls


Served = list[tuple[EngineConfig, ServerConfig]]


def test_flags(served: Served) -> None:
    assert (
        main(["serve", "m", "--port", "1", "--api-key", "a", "b", "--kv-cache-dtype", "int8"]) == 0
    )
    config, server = served[0]
    assert (config.model.model, config.cache.kv_cache_dtype) == ("m", "int8")
    assert (server.port, tuple(server.api_key)) == (1, ("a", "b"))


@pytest.mark.parametrize("arguments", [["--model", "m"], ["m"], ["m", "--model=m"]])
def test_model_as_flag_or_argument(served: Served, arguments: list[str]) -> None:
    assert main(["serve", "--port", "1", *arguments]) == 0
    assert served[0][0].model.model == "m"


def test_vllms_spelling(served: Served) -> None:
    module = "tightkv.entrypoints.openai.api_server"
    arguments = mock.patch.object(sys, "argv", [module, "--model", "m", "--port", "5"])
    with arguments, pytest.raises(SystemExit) as exit:
        runpy.run_module(module, run_name="__main__")
    assert exit.value.code == 0
    assert served[0][1].port == 5


def test_file_of_flags(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: from_file\nport: 7\nkv_cache_memory_bytes: 2GiB\nenable-prefix-caching: false\n"
        "api-key: [a, b]\nkv-cache-dtype-skip-layers: [-1]\n"
    )
    assert main(["serve", "--config", str(file), "--port", "9", "other"]) == 0
    config, server = served[0]
    assert config.model.model == "other"
    assert server.port == 9
    assert config.cache.kv_cache_memory_bytes == 2 << 30
    assert config.cache.enable_prefix_caching is False
    assert tuple(server.api_key) == ("a", "b")
    assert tuple(config.cache.kv_cache_dtype_skip_layers) == ("-1",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "did you mean port?"),
        ("port:", "has no value"),
        ("- port", "mapping"),
        ("port: [", "no YAML file"),
        ("enable_lora: true", "--enable-lora is refused"),
        ("swap-space: [1, 2]", "swap-space has 2 values: give one."),
    ],
)
def test_wrong_files(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert main(["serve", "m", "--config", str(file)]) == 2
    assert words in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "MODEL is missing"),
        (["m", "--model", "n"], "given twice"),
        (["m", "--config", "absent.yaml"], "cannot be read"),
        (["m", "--enable-lora"], "LoRA adapters are not served"),
        (["m", "--quantization", "awq"], "--quantization is refused"),
        (["m", "--distributed-executor-backend", "mp"], "Unknown argument '--distributed"),
    ],
)
def test_wrong_flags(
    served: Served, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
    assert not served


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--host", "203.0.113.1", "--port", "1"], "Cannot listen"),
        (["--kv-quality-sample-rate", "2"], "kv_quality_sample_rate"),
        (["--ssl-keyfile", "absent"], "go together"),
        (["--shutdown-timeout", "inf"], "shutdown_timeout is inf"),
        (["--api-key", ""], "api_key is empty"),
        (["--port", "0"], "absent-model"),
        (["--port", "0", "--tensor-parallel-size", "2"], "tensor_parallel_size is 2"),
        (["--port", "0", "--swap-space", "-4"], "swap_space is -4"),
        (["--port", "0", "--swap-space", "nan"], "swap_space is nan"),
        (["--port", "0", "--swap-space", "1e9"], "GiB free"),
        (["--port", "0", "--swap-space", "0.1", "--swap-dir", "/absent/swap"], "cannot be made"),
        (["--port", "0", "--swap-dir", "/tmp"], "swap_space is 0"),
        (["--port", "0", "--preemption-mode", "swap"], "swap_space is 0"),
    ],
)
def test_refused_before_anything_loads(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["serve", "./absent-model", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
