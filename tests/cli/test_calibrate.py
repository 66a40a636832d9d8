"""`tightkv calibrate`, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightkv.cli.main import main
from tightkv.formats import read_scales_file
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "prose.txt"
    path.write_text("The lighthouse stood on the rock, and the sea went round it. " * 30)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["--quiet", "calibrate", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


SMALL = ["--num-samples", "4", "--max-seq-len", "64"]


def test_a_file_and_a_table(
    folder: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scales.json"
    status, out, _ = run(capsys, folder, "--data", text, *SMALL, "-o", str(output))
    assert status == 0
    content = read_scales_file(output)
    assert content.made_by.data == ("prose.txt",)
    assert content.made_by.method == "two-factor"
    assert "absmax^" in out
    assert f"--quantization-config-path {output}" in out
    status = main(
        [
            "--quiet",
            "generate",
            folder,
            "--prompt",
            "abc",
            "--max-tokens",
            "2",
            "--quantization-config-path",
            str(output),
            "--kv-cache-memory-bytes",
            "1MiB",
        ]
    )
    assert status == 0


def test_static_scales(
    folder: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scales.json"
    arguments = [folder, "--data", text, *SMALL, "-o", str(output), "--static"]
    status, out, _ = run(capsys, *arguments, "--granularity", "head", "--method", "mse")
    assert status == 0
    assert "head ×" in out
    assert read_scales_file(output).layers["0"].k.granularity == "head"


def test_wrong_input_is_one_sentence_and_no_file(
    folder: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scales.json"
    for arguments, words in (
        (["--data", str(tmp_path / "no.txt")], "cannot be read"),
        (["--data", "self", text], "one or the other"),
        (["--data", text, "--granularity", "head"], "static"),
        (["--data", text, "--max-seq-len", "100000"], "512 positions"),
    ):
        status, _out, err = run(capsys, folder, *arguments, "-o", str(output))
        assert status == 2
        assert words in err
        assert len(err.strip().splitlines()) == 1
        assert not output.exists()
    status, _, err = run(capsys, folder, "--data", text, "-o", str(tmp_path / "no" / "x.json"))
    assert status == 2
    assert "cannot be written" in err
