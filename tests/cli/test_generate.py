"""The command line, in this process and as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tightkv.cli.main import main
from tightkv.cli.options import parse_bytes
from tiny_models import save_tiny_model

POOL = ["--kv-cache-memory-bytes", "4MiB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["--quiet", "generate", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_prompts_are_answered(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [folder, *POOL, "--temperature", "0", "--max-tokens", "5", "--ignore-eos"]
    status, out, _ = run(capsys, *arguments, "--prompt", "abc", "--prompt", "xyz")
    assert status == 0
    both = out.splitlines()
    _, alone, _ = run(capsys, *arguments, "--prompt", "xyz")
    assert alone.splitlines()[-1] == both[-1]


def test_file_of_prompts_to_file_of_answers(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '"plain"\n\n{"prompt": "as a field"}\n{"messages": [{"role": "user", "content": "hi"}]}\n'
    )
    answers = tmp_path / "answers.jsonl"
    status, out, _ = run(
        capsys,
        folder,
        *POOL,
        "--prompts-file",
        str(prompts),
        "-o",
        str(answers),
        "--max-tokens",
        "3",
        "--ignore-eos",
        "--kv-cache-dtype",
        "int8",
        "--kv-cache-dtype-skip-layers",
        "0",
        "-1",
        "--n",
        "2",
    )
    assert (status, out) == (0, "")
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    texts = [record["prompt"] for record in records]
    assert texts == ["plain", "as a field", "user: hi\nassistant: "]
    assert all(len(record["outputs"]) == 2 for record in records)
    assert all(len(o["token_ids"]) == 3 for record in records for o in record["outputs"])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert answers.stat().st_mode & 0o444 == prompts.stat().st_mode & 0o444


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{folder}"], "no prompt"),
        (["no/such/folder", "--prompt", "x"], "no/such/folder"),
        (["{folder}", "--prompt", "x", "--kv-cache-dtype", "int3"], "int3"),
        (["{folder}", "--prompt", "x", "--max-tokens", "-1"], "max_tokens"),
        (["{folder}", "--prompt", "x", "--enable-lora"], "LoRA"),
        (["{folder}", "--prompt", "x", "--speculative-config", "{}"], "speculative"),
        (["{folder}", "--prompt", "x", "--tensor-parallel-size", "2"], "one device"),
        (["{folder}", "--prompt", "x" * 600], "600 tokens"),
        (["{folder}", "--prompts-file", "{tmp}/none.jsonl"], "none.jsonl"),
        (["{folder}", "--prompts-file", "{tmp}/bad.jsonl"], "line 2"),
        (["{folder}", "--prompt", "x", "-o", "{tmp}/no/such/answers.jsonl"], "answers.jsonl"),
        (["{folder}", "--prompt", "x", "-o", "{tmp}"], "cannot be written"),
        (["x" * 5000, "--prompt", "x"], "cannot be read"),
        (["{folder}", "--prompt", "x", "--chat-template", "{tmp}/none.jinja"], "none.jinja"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    (tmp_path / "bad.jsonl").write_text('"good"\n{"promt": 1}\n')
    filled = [argument.replace("{folder}", folder) for argument in arguments]
    filled = [argument.replace("{tmp}", str(tmp_path)) for argument in filled]
    status, out, err = run(capsys, *filled, *POOL)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_broken_checkpoint_is_one_sentence(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = save_tiny_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    status, _, err = run(capsys, str(broken), "--prompt", "x")
    assert status == 2
    assert err.count("\n") == 1
    assert "broken" in err


def test_a_failed_request_is_told_and_the_others_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][ord("z") - ord("!")] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    arguments = ["--max-tokens", "4", "--temperature", "0", "--ignore-eos"]
    alone = run(capsys, str(folder), *POOL, *arguments, "--prompt", "abc")
    status, out, err = run(
        capsys, str(folder), *POOL, *arguments, "--prompt", "abc", "--prompt", "azc"
    )
    assert alone[0] == 0
    assert status == 1
    assert out.startswith(alone[1])
    assert "NaN" in err


def test_sizes() -> None:
    assert parse_bytes("123") == 123
    assert parse_bytes("2GiB") == 2 * 2**30
    assert parse_bytes("1.5g") == 1_500_000_000
    assert parse_bytes("512 MB") == 512_000_000
    with pytest.raises(Exception, match="no size"):
        parse_bytes("lots")


def test_as_a_process(folder: str) -> None:
    """The installed command, with its log on stderr and the answer alone on stdout."""
    command = [sys.executable, "-m", "tightkv", "generate", folder, *POOL]
    done = subprocess.run(
        [*command, "--prompt", "abc", "--max-tokens", "2", "--ignore-eos"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "CPU KV cache size: " in done.stderr
    assert "Traceback" not in done.stderr
    version = subprocess.run(
        [sys.executable, "-m", "tightkv", "--version"], capture_output=True, text=True, check=True
    )
    assert version.stdout.startswith("tightkv ")
