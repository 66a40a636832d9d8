"""The Triton kernels compile for GPUs that are not here, and are what the benchmarks count on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tightkv[triton]'")

ROOT = Path(__file__).parents[3]


def run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: Triton asks at its import whether to interpret or to compile."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def assert_compiles(folder: Path, capability: int, kernels: Sequence[str], count: int) -> None:
    """Without spills, with wide loads, and no code that could differ by fused or flushed sums."""
    result = run_module(
        "benchmarks.gpu.compile_ahead",
        "--quick",
        "--capabilities",
        str(capability),
        "--kernels",
        *kernels,
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(folder),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("fine") == count


def test_the_write_compiles(tmp_path: Path) -> None:
    assert_compiles(tmp_path, 90, ["write"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    assert_compiles(tmp_path, capability, ["write", "decode", "prefill", "reduce"], 7)


@pytest.mark.slow
def test_calls_become_launches(tmp_path: Path) -> None:
    """What the backend hands over is what the kernels take when they are compiled, too."""
    result = run_module(
        "triton_without_gpu",
        TRITON_INTERPRET="0",
        TRITON_CACHE_DIR=str(tmp_path),
        PYTHONPATH=os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    )
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert last == "write_kernel decode_kernel reduce_kernel prefill_kernel"


@pytest.mark.slow
def test_benchmark_in_the_interpreter() -> None:
    result = run_module(
        "benchmarks.gpu.measure", "--smoke", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["checks"]["passed"]
    assert all(report[section] for section in ("decode", "prefill", "folding", "serving"))
    assert report["left_out"] == report["errors"] == []
