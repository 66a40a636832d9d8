from __future__ import annotations

import json
import sys

import pytest
from benchmarks.scheduler import WAYS, main


def test_the_last_line_is_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--steps", "8", "--seqs", "4", "--requests", "3"]
    monkeypatch.setattr(sys, "argv", ["scheduler", *sizes])
    main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["work"] for row in result["overhead"]} == {
        "1 group",
        "5 groups, 4 with a window",
        "1 group, full pool",
        "1 group, full pool, no reserve",
        "1 group, full pool, no reserve, swap",
    }
    assert all(0 < row["median"] <= row["p99"] for row in result["overhead"])
    assert {row["way"] for row in result["loss"]} == set(WAYS)
    assert all(0 <= row["computed_twice"] < 1 for row in result["loss"])
