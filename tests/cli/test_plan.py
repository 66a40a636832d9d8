"""`tightkv plan`, in this process."""

from __future__ import annotations

import json

import pytest

from model_configs import CONFIGS
from tightkv.cli.main import main
from tightkv.planning import LANGUAGES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "Small-Llama"
    path.mkdir()
    content = CONFIGS["Llama-3-8B"].as_json() | {"num_hidden_layers": 2}
    (path / "config.json").write_text(json.dumps(content))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(["--quiet", "plan", *arguments])
    except SystemExit as end:  # argparse ends the process itself
        status = int(end.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_table(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, folder, "--hardware", "l4", "--max-model-len", "4k")
    assert (status, err) == (0, "")
    for words in ("Small-Llama on NVIDIA L4 24GB", "KV cache pool", "requests of 4,096", "int8"):
        assert words in out
    assert "2 layers × 8 KV heads × (128 + 128) values × 2 bytes = 8,192 bytes per token" in out


def test_one_column_where_the_ordinary_request_is_the_longest(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("--max-model-len", "256", "--typical-len", "256", "--concurrency", "2")
    _, out, _ = run(capsys, folder, "--hardware", "l4", "-o", "md", *lengths)
    assert out.count("requests of 256 |") == 1
    assert out.count("| int8 | 256 |") == 1
    _, out, _ = run(capsys, folder, "--hardware", "l4", "-o", "md", "--max-model-len", "256")
    assert out.count("requests of 256 |") == 1
    _, out, _ = run(capsys, folder, "--hardware", "l4", "-o", "md", "--typical-len", "256")
    assert "| requests of 8,192 | requests of 256 |" in out


def test_markdown(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, folder, "--hardware", "a100-40g", "-o", "md")
    assert status == 0
    tables = [line for line in out.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in tables}) == 2  # the waterfall's columns, the formats'


@pytest.mark.parametrize("language", LANGUAGES)
def test_json(folder: str, language: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, folder, "--hardware", "h200", "-o", "json", "--lang", language, "--num-gpus", "2"
    )
    content = json.loads(out)
    assert status == 0
    assert (content["schema_version"], content["fits"]) == (1, True)
    assert [entry["name"] for entry in content["formats"]] == ["bfloat16", "fp8", "int8"]
    assert content["settings"]["tensor_parallel_size"] == 2
    is_chinese = any("\u4e00" <= c <= "\u9fff" for c in content["recommendation"][0]["text"])
    assert is_chinese == (language == "zh")


def test_what_does_not_fit_is_status_1(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, folder, "--hardware", "l4", "--weight-bytes", "40GB")
    assert status == 1
    assert "will not help" in out
    status, out, _ = run(capsys, folder, "--hardware", "l4", "--concurrency", "100000")
    assert status == 1
    assert "It does not fit" in out


def test_wrong_input_is_one_sentence_and_status_2(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (["--hardware", "a100"], "choose one of"),
        (["--hardware", "custom:96"], "GiB"),
        (["--max-model-len", "16q"], "no length"),
        (["--kv-cache-memory-bytes", "5x"], "no size"),
        (["--hardware", "l4", "--tensor-parallel-size", "3"], "does not divide"),
        (["--lang", "fr"], "choose one of en, zh"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--kv-cache-dtype", "int3"], "'int3' is no KV cache dtype"),
        (["--compare", "nowhere"], "no address"),
    ):
        status, out, err = run(capsys, folder, *arguments)
        assert (status, out) == (2, ""), arguments
        assert words in err
        assert len(err.strip().splitlines()) == 1
    status, _, err = run(capsys)
    assert status == 2
    assert "MODEL" in err
