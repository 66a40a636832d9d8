"""What a request leaves open: the model's own recommendation, or OpenAI's defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from live_server import live_server
from tightkv.errors import ConfigError
from tiny_models import save_tiny_model

COLD = {"temperature": 1e-6, "repetition_penalty": 1.2, "max_new_tokens": 3}


def folder_with(tmp_path: Path, **settings: float) -> Path:
    folder = save_tiny_model(tmp_path / "llama")
    path = folder / "generation_config.json"
    given = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**given, **settings}))
    return folder


def texts(folder: Path, source: str, **body: float) -> set[str]:
    """Different answers to the same request, which brings no seed."""
    with live_server(folder, {"generation_config": source}) as server, server.client() as client:
        whole = {"prompt": "The fox", "max_tokens": 12, "ignore_eos": True, **body}
        answers = [client.post("/v1/completions", json=whole).json() for _ in range(4)]
    return {answer["choices"][0]["text"] for answer in answers}


def test_the_models_own_are_taken_unless_a_request_says_otherwise(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, **COLD)
    own = texts(folder, "auto")
    assert len(own) == 1
    assert own == texts(folder, "vllm", temperature=0, repetition_penalty=1.2)
    assert own != texts(folder, "vllm", temperature=0)
    assert len(texts(folder, "auto", temperature=1)) > 1
    assert len(texts(folder, "vllm")) > 1


def test_they_are_taken_in_conversations_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_with(tmp_path, **COLD)
    with caplog.at_level("INFO", "tightkv"), live_server(folder) as server:
        assert server.serving.sampling_defaults == {"temperature": 1e-6, "repetition_penalty": 1.2}
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}
        with server.client() as client:
            answers = [client.post("/v1/chat/completions", json=body).json() for _ in range(3)]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert "temperature 1e-06, repetition_penalty 1.2 (--generation-config vllm" in caplog.text


def test_nothing_is_taken_from_a_model_that_sets_nothing(tmp_path: Path) -> None:
    with live_server(save_tiny_model(tmp_path / "llama")) as server:
        assert server.serving.sampling_defaults == {}


def test_a_value_that_no_request_may_have(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, repetition_penalty=5000)
    refused = pytest.raises(ConfigError, match=r"cannot be followed: repetition_penalty must be")
    with refused, live_server(folder):
        pass
    with live_server(folder, {"generation_config": "vllm"}):
        pass
