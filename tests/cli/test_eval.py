"""`tightkv eval`, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tightkv.cli.main import main
from tiny_models import save_tiny_model

SMALL = [
    *("--num-samples", "1", "--max-seq-len", "96", "--num-prompts", "2", "--prompt-len", "12"),
    *("--max-tokens", "8", "--retrieval-lengths", "0"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["--quiet", "eval", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_table_reports_and_the_status(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [folder, *SMALL, "--kv-cache-dtype", "int8,float16", "--output-dir", str(tmp_path)]
    status, out, err = run(capsys, *arguments, "--max-kld", "1", "--min-top1", "0")
    assert (status, err) == (0, "")
    assert any(line.startswith("float16 ") for line in out.splitlines())  # a row has its name
    assert "safe" in out
    assert "report.html" in out
    assert json.loads((tmp_path / "report.json").read_text())["schema_version"] == 1
    # Measured already: only the judgement differs.
    status, out, _ = run(capsys, *arguments, "--max-kld", "0")
    assert status == 1
    assert "unsafe" in out
    status, out, _ = run(capsys, *arguments, "--max-kld", "1", "--min-top1", "0", "--details")
    assert status == 0
    assert "Mean KLD" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-cache-dtype", "int9"], "'int9' is no KV cache dtype"),
        (["--data", "no-such-file.txt"], "cannot be read"),
        (["--tasks", "gsm8k=no-such-file.jsonl"], "no-such-file.jsonl"),
        (["--max-kld", "-1"], "max_kld is -1"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_wrong_input_is_one_sentence(
    folder: str,
    tmp_path: Path,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = run(capsys, folder, *SMALL, "--output-dir", str(tmp_path), *arguments)
    assert status == 2
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
    assert not (tmp_path / "report.json").exists()
