"""`tightkv bench`, in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from live_server import LiveServer, live_server
from tightkv.benchmark import ServedModel
from tightkv.cli import bench_serve
from tightkv.cli.main import main
from tiny_models import save_tiny_model

ENGINE = ["--max-num-seqs", "4", "--max-model-len", "128", "--kv-cache-memory-bytes", "64KiB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[LiveServer]:
    with live_server(folder) as live:
        yield live


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, output and errors; a parser ends with `SystemExit`."""
    try:
        status = main(["--quiet", "bench", *arguments])
    except SystemExit as exit:
        status = int(exit.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_throughput(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "figures.json", tmp_path / "figures.html"
    status, out, _ = run(
        capsys,
        *("throughput", folder, *ENGINE, "--kv-cache-dtype", "auto,int8", "-r", "2"),
        *("--num-prompts", "4", "--input-len", "12", "--output-len", "4"),
        *("--output-json", str(file), "--plot", str(page)),
    )
    assert status == 0
    assert "±" in out
    document = json.loads(file.read_text())
    assert [row["kv_cache_dtype"] for row in document["rows"]] == ["auto", "int8"]
    text = page.read_text()
    assert "<svg" in text
    assert "<td>int8</td>" in text
    assert not re.search(r"<(script|link|img|image)\b", text)  # it needs nothing else


@pytest.mark.parametrize("form", ["md", "csv", "json", "table"])
def test_latency_in_every_form(folder: str, capsys: pytest.CaptureFixture[str], form: str) -> None:
    status, out, _ = run(
        capsys,
        *("latency", folder, *ENGINE, "--kv-cache-dtype", "int8", "-r", "2", "-o", form),
        *("--batch-size", "1,2", "--input-len", "8", "--output-len", "3", "--depth", "0,16"),
    )
    assert status == 0
    if form == "json":
        rows = json.loads(out)["rows"]
        assert [(row["n_depth"], row["batch_size"]) for row in rows] == [
            *((0, 1), (0, 2), (16, 1), (16, 2)),
        ]
        assert {"avg_latency", "latencies", "percentiles"} <= set(rows[0])
    elif form == "csv":
        assert len(out.strip().splitlines()) == 5
    else:
        assert "pp8+tg3 @ d16" in out
        assert out.startswith("**") == (form == "md")


@pytest.mark.slow
def test_kv(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "kv.png"
    status, out, _ = run(
        capsys,
        *("kv", folder, "--kv-cache-dtype", "float16,int8", "--input-len", "16"),
        *("--output-len", "32", "--plot", str(picture), "-o", "md"),
    )
    assert status == 0
    assert "| requests of 48 tokens that fit | 4.00 | 7.00 |" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_serve(server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys,
        *("serve", "tiny", "--base-url", f"{server.url}/v1", "--num-prompts", "6"),
        *("--input-len", "12", "--output-len", "4", "--max-concurrency", "1,3"),
        *("--goodput", "ttft:60000", "--percentile-metrics", "ttft,e2el"),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new")),
    )
    assert status == 0
    assert out.count("Serving Benchmark Result") == 2
    assert out.count("Request goodput") == 2
    assert "Inter-token" not in out
    assert "all at once, at most 3" in out
    files = sorted((tmp_path / "new").iterdir())
    assert len(files) == 2
    document = json.loads(files[0].read_text())
    assert (document["completed"], document["max_concurrency"]) == (6, 1)
    assert len(document["ttfts"]) == 6


def test_serve_tells_failed_requests(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "a", "output_tokens": 3}\n{"prompt": "b"}\n')
    arguments = ["--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "2"]
    status, out, _ = run(
        capsys,
        *("serve", "--base-url", server.url, *arguments),
        *("--extra-body", '{"stop_token_ids": "x"}'),
    )
    assert status == 1
    status, out, _ = run(capsys, "serve", "--base-url", server.url, *arguments, "-o", "json")
    assert status == 0
    assert json.loads(out)["rows"][0]["completed"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Say what to measure"),
        (["throughput"], "MODEL is missing"),
        (["throughput", "FOLDER", "--nope"], "Unknown argument '--nope'"),
        (["throughput", "FOLDER", "--num-prompts", "x"], "--num-prompts is 'x'"),
        (["throughput", "FOLDER", "--num-prompts", "0"], "--num-prompts is 0"),
        (["throughput", "FOLDER", "--kv-cache-dtype", "int9"], "'int9' is no KV cache dtype"),
        (["throughput", "FOLDER", "--k-cache-dtype", "int8"], "--k-cache-dtype is not taken here"),
        (["throughput", "FOLDER", "--enable-lora"], "--enable-lora is refused"),
        (["throughput", "FOLDER", "--dataset-name", "azure"], "name the file"),
        (["throughput", "FOLDER", "--metric-percentiles", "101"], "--metric-percentiles"),
        (["throughput", "FOLDER", "--input-len", "9999"], "--input-len"),
        (["throughput", "FOLDER", "--plot", "x.gif"], "--plot is 'x.gif'"),
        (["throughput", "FOLDER", "--output-json", "/no/such/x"], "cannot be written"),
        (["throughput", "FOLDER", "-r", "0"], "-r is 0"),
        (["latency", "FOLDER", "--depth", "5"], "--depth has 5"),
        (["latency", "FOLDER", "--batch-size", "1,b"], "--batch-size is '1,b'"),
        (["kv", "FOLDER", "--input-len", "5000"], "longer than the"),
        (["kv", "/no/model"], "There is no folder"),
        (["kv", "FOLDER", "-o", "yaml"], "--output is 'yaml'"),
        (["serve", "--base-url", "localhost"], "--base-url is 'localhost'"),
        (["serve", "--goodput", "itl:3"], "--goodput has 'itl:3'"),
        (["serve", "--request-rate", "1,0"], "--request-rate is '1,0'"),
        (["serve", "--max-concurrency", "1.5"], "whole numbers"),
        (["serve", "--percentile-metrics", "qps"], "--percentile-metrics has 'qps'"),
        (["serve", "--extra-body", "[]"], "no JSON object"),
        (["serve", "--arrival-scale", "-1"], "--arrival-scale is -1"),
    ],
)
def test_a_wrong_flag_is_one_sentence_and_status_2(
    folder: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    status, out, err = run(capsys, *(folder if each == "FOLDER" else each for each in arguments))
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_no_tokenizer_is_one_sentence(
    server: LiveServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = ServedModel("tiny", "/models/elsewhere", 512)
    monkeypatch.setattr(bench_serve, "find_model", lambda *_: elsewhere)
    status, _, err = run(capsys, "serve", "--base-url", server.url)
    assert status == 2
    assert "with --tokenizer" in err
    assert len(err.strip().splitlines()) == 1


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "serve", "--port", "1")
    assert status == 1
    assert err == (
        "error: http://127.0.0.1:1 does not answer (Connection refused): start the server, or "
        "correct --base-url.\n"
    )
