"""Whatever is wrong with a command line: one sentence on stderr, exit status 2."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from tightkv.cli.main import main
from tiny_models import save_tiny_model

# FOLDER is a tiny model. Each line has the arguments, and words of the sentence.
CASES = {
    "": "COMMAND is missing",
    "srve": "COMMAND is 'srve': choose one of serve, generate",
    "--quite serve": "Unknown argument '--quite': leave it out; see `tightkv --help`.",
    "serve FOLDER --max-num-seqs abc": "--max-num-seqs is 'abc': give a whole number; see",
    "serve FOLDER --kv-cache-memory-bytes 5XB": "--kv-cache-memory-bytes: '5XB' is no size: give",
    "serve FOLDER --nope 5": "Unknown argument '--nope': leave it out; see `tightkv serve --help`.",
    "serve FOLDER --port": "--port has no value: give one",
    "serve FOLDER --api-key": "--api-key has no value: give one or more",
    "serve FOLDER --enable-prefix-caching=5": "takes no value, and '5' was given: leave it out",
    "serve FOLDER --dtype int8": "--dtype is 'int8': choose one of auto, float32",
    "serve FOLDER --kv-cache int8": "Ambiguous option",
    "serve FOLDER extra": "Unknown argument 'extra'",
    "serve FOLDER --gpu-memory-utilization nan": "above 0 and at most 1",
    "serve --port 1": "MODEL is missing",
    "generate FOLDER --prompt": "--prompt has no value",
    "generate FOLDER --prompt a --n x": "--n is 'x': give a whole number",
    "generate FOLDER --prompt a --temperature hot": "--temperature is 'hot': give a number",
    "calibrate FOLDER --margin x": "--margin is 'x': give a number",
    "calibrate FOLDER --kv-cache-dtype int3": "--kv-cache-dtype is 'int3': choose one of",
    "eval FOLDER --retrieval-lengths x": "--retrieval-lengths is 'x': give a whole number",
    "eval FOLDER --retrieval-lengths 8 -8": "retrieval_lengths are",
    "eval FOLDER --max-seq-len 1": "max_seq_len is 1: it must be at least 2",
    "eval FOLDER --task-limit 0": "task_limit is 0",
    "eval FOLDER --baseline-kv-cache-dtype foo": "'foo' is no KV cache dtype",
    "eval FOLDER --kv-cache-dtype ,": "names no KV cache dtype",
    "plan": "MODEL is missing",
    "plan FOLDER --max-model-len 0": "for 16 times 1,024; see `tightkv plan --help`.",
    "plan FOLDER --hardware custom:": "'custom:' has no memory",
    "plan FOLDER --hardware h200 --tensor-parallel-size 3": "does not divide",
    "plan FOLDER --kv-cache-dtype": "has no value",
    "plan FOLDER --kv-cache-dtype int8/int3": "'int3', as in 'int8/int3', is no KV cache dtype",
    "plan FOLDER --kv-cache-dtype int8,fp8 int8": "twice",
    "plan FOLDER --typical-len 600": "longer than the 512",
    "plan FOLDER --weight-bytes 5x": "'5x' is no size",
    "plan --kv-cache-dtype int8 FOLDER": "MODEL is missing: give it, in front of the flags",
    "bench": "Say what to measure",
    "bench foo": "WHAT is 'foo'",
    "bench throughput FOLDER --num-prompts x": "--num-prompts is 'x'",
    "bench throughput FOLDER --random-prefix-len -1": "--random-prefix-len is -1: give a number",
    "bench latency FOLDER --depth a": "--depth is 'a'",
    "bench kv FOLDER --kv-cache-dtype ,": "names no KV cache dtype",
    "bench kv --kv-cache-dtype int8 FOLDER": "MODEL is missing: give it in front of the flags",
    "bench kv FOLDER --input-len 600": "longer than the 512",
    "bench serve --port abc": "--port is 'abc'",
    "bench serve --num-warmups -1": "--num-warmups is -1: give a number from 0 on",
    "bench serve --max-model-len 0": "--max-model-len is 0: give a number from 1 on",
    "bench serve --extra-body {": "is no JSON",
    "bench serve --goodput": "has no value",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


@pytest.mark.parametrize("line", CASES)
def test_one_sentence_and_status_2(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # where eval writes
    assert main([part.replace("FOLDER", folder) for part in line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (sentence,) = captured.err.splitlines()
    assert CASES[line] in sentence
    assert re.match(r"error: \S.*[^.;:]\.$", sentence)


def test_a_servers_flags_by_vllms_name(capsys: pytest.CaptureFixture[str]) -> None:
    module = "tightkv.entrypoints.openai.api_server"
    arguments = [module, "--model", "m", "--max-num-seqs", "abc"]
    with mock.patch.object(sys, "argv", arguments), pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: --max-num-seqs is 'abc': give a whole number; see `tightkv serve --help`.\n"
    )


@pytest.mark.parametrize("written", [["int8,fp8"], ["int8", "fp8"], ["int8,", "fp8"]], ids=str)
def test_formats_with_commas_or_blanks(
    folder: str, capsys: pytest.CaptureFixture[str], written: list[str]
) -> None:
    assert main(["plan", folder, "--hardware", "l4", "-o", "md", "--kv-cache-dtype", *written]) == 0
    out = capsys.readouterr().out
    assert "\n| int8 |" in out
    assert "\n| fp8 |" in out
    assert "\n| auto |" not in out


def test_a_pool_in_plain_bytes(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As `tightkv serve` and vLLM take it."""
    assert main(["plan", folder, "--kv-cache-memory-bytes", str(1 << 20)]) == 0
    assert "1.00 MiB" in capsys.readouterr().out
