"""A plan beside a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from live_server import live_server
from tightkv import plan
from tightkv.capacity import compare, read_server
from tightkv.cli.main import main
from tightkv.errors import CheckpointError, ConfigError
from tiny_models import save_tiny_model

VLLM = (
    "# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{block_size="16",cache_dtype="fp8",num_gpu_blocks="1000"} 1.0\n'
)


def test_this_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_tiny_model(tmp_path, "llama"))
    options: dict[str, Any] = {"k_cache_dtype": "int8", "v_cache_dtype": "fp8"}
    with live_server(folder, kv_cache_memory_bytes=1 << 20, **options) as server:
        facts = read_server(server.url)
        assert facts.kv_cache_dtype == "int8/fp8"
        # The server has 4 sequences at most, and so a pool that is cut.
        size = int(facts.memory["kv_cache"])
        planned = plan(folder, kv_cache_memory_bytes=size, max_num_seqs=4, **facts.options)
        rows = {row.key: row for row in compare(planned, facts, server.url).rows}
        for key in ("what_bytes_per_token", "what_blocks", "what_pool", "what_tokens"):
            assert rows[key].difference == 0, key
        assert rows["what_weights"].difference == 0
        assert rows["what_activations"].difference == 0
        status = main(["--quiet", "plan", folder, "--compare", server.url])
    out = capsys.readouterr().out
    assert status == 0
    assert "Predicted and actual" in out
    assert "KV bytes per token" in out


def test_a_server_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "metrics"
    page.write_text(VLLM)
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: page.open("rb"))
    facts = read_server("http://somewhere:8000/v1")
    assert facts.options == {"kv_cache_dtypes": ("fp8",), "block_size": 16}
    folder = str(save_tiny_model(tmp_path / "model", "llama"))
    rows = compare(plan(folder, hardware="l4", **facts.options), facts, "http://x").rows
    assert [row.key for row in rows] == ["what_tokens"]
    assert rows[0].actual == 16_000
    page.write_text("something_else 1.0\n")
    with pytest.raises(CheckpointError, match="cache_config_info"):
        read_server("http://somewhere:8000")


def test_no_server() -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_server("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="no address"):
        read_server("localhost:8000")
