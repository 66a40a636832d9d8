from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from real_model import smollm2_folder

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_our_server_alone(tmp_path: Path) -> None:
    smollm2_folder()
    output = tmp_path / "result.json"
    environment = {
        name: value
        for name, value in os.environ.items()
        # The model is converted once for all runs of the tests.
        if name not in ("TIGHTKV_CACHE_DIR", "VLLM_PYTHON", "LLAMA_CPP_PYTHON")
    }
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.servers", "--quick", "--output", str(output)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == json.loads(output.read_text())
    result = json.loads(output.read_text())
    assert result["notes"] == []
    (figures,) = result["figures"]["TightKV"]
    assert figures["answered"] == result["requests"] == 12
    assert 0 < figures["ttft_p50"] <= figures["ttft_p99"] < figures["seconds"]
    assert figures["tpot_p50"] > 0
    assert figures["alone"]["answered"] == 12
    assert figures["alone"]["tpot_p50"] > 0
    assert result["figures"]["vLLM"] == "not given: set VLLM_PYTHON"
    bars = {row["work"]: row["bar"] for row in result["rows"] if row["peer_name"] == "vLLM"}
    assert bars["requests"] == "≥ 1.00"
    assert bars["time to first token, p99"] == "≤ 1.00"
    assert bars["1 client: time per further token, p50"] == "≤ 1.00"
