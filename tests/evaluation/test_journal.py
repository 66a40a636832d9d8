"""What an interrupted run leaves, and how it goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tightkv.errors import OutputError, RequestError
from tightkv.evaluation.journal import Journal


def never() -> int:
    raise AssertionError("measured again")


def test_a_result_is_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    journal = Journal(path, "run")
    as_json: list[Any] = [1, 0.1]
    measured: list[Any] = [
        journal.once("a", lambda: (1, 0.1)),
        journal.once("a", never),
        Journal(path, "run").once("a", never),
    ]
    assert measured == [as_json] * 3


def test_without_a_file() -> None:
    journal = Journal(None, "run")
    assert journal.once("a", lambda: 1) == journal.once("a", never) == 1


def test_a_line_that_was_cut_short_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    journal = Journal(path, "run")
    journal.once("a", lambda: 1)
    journal.once("b", lambda: 2)
    path.write_bytes(path.read_bytes()[:-7])
    journal = Journal(path, "run")
    assert journal.has("a")
    assert not journal.has("b")
    assert journal.once("b", lambda: 3) == 3
    again = Journal(path, "run")
    assert (again.once("a", never), again.once("b", never)) == (1, 3)


def test_a_file_of_another_run_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    Journal(path, "one").once("a", lambda: 1)
    content = path.read_bytes()
    with pytest.raises(RequestError, match="other options, data or model"):
        Journal(path, "another")
    path.write_text("something else\n")
    with pytest.raises(RequestError, match="other options, data or model"):
        Journal(path, "one")
    path.write_bytes(content)
    assert Journal(path, "one").has("a")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="--output-dir"):
        Journal(tmp_path / "no" / "progress.jsonl", "run")


def test_what_is_not_a_number_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    assert math.isnan(Journal(path, "run").once("a", lambda: float("nan")))
    assert math.isnan(Journal(path, "run").once("a", never))
