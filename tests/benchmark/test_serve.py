"""Loads for a live server of a tiny model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from live_server import LiveServer, live_server
from tightkv.benchmark import (
    CHAT,
    DatasetConfig,
    LoadConfig,
    ServeReport,
    Target,
    bench_serve,
    find_model,
    parse_address,
)
from tightkv.benchmark.tables import as_markdown, console_block, serve_table
from tightkv.errors import ConfigError, EngineError
from tiny_models import save_tiny_model, tiny_tokenizer

AT_ONCE = LoadConfig()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "llama")
    with live_server(folder) as live:
        yield live


@pytest.fixture
def target(server: LiveServer) -> Target:
    return Target(
        address=parse_address(server.url), model="tiny", ignore_eos=True, body={"temperature": 0}
    )


def measured(target: Target, *loads: LoadConfig, **options: Any) -> ServeReport:
    data = DatasetConfig(num_prompts=8, input_len=20, output_len=6)
    return bench_serve(target, options.pop("data", data), loads, tiny_tokenizer(), **options)


def test_all_requests_are_answered_as_long_as_asked(target: Target) -> None:
    told: list[tuple[str, int, int]] = []
    report = measured(target, AT_ONCE, progress=lambda *of: told.append(of))
    (run,) = report.runs
    figures = run.figures
    assert (figures.completed, figures.failed) == (8, 0)
    assert (figures.total_input_tokens, figures.total_output_tokens) == (8 * 20, 8 * 6)
    for timing in figures.timings:
        assert len(timing.token_times) == 6
        assert 0 < timing.ttft <= timing.e2el < figures.duration  # all may come at once
    assert told[-1] == ("load 1 of 1", 8, 8)
    document = report.as_json(run, detailed=True)
    assert document["request_rate"] == "inf"
    assert [len(gaps) for gaps in document["itls"]] == [5] * 8


def test_the_console_block_has_vllms_lines(target: Target) -> None:
    load = LoadConfig(request_rate=200.0, max_concurrency=2)
    report = measured(target, load, percentiles=(50.0, 99.0), goodput={"ttft": 60e3})
    lines = console_block(report.runs[0], metrics=("ttft", "e2el")).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == f"{'Successful requests:':<40} 8"
    assert f"{'Maximum request concurrency:':<40} 2" in lines
    assert f"{'Request rate configured (RPS):':<40} 200.00" in lines
    names = [line.split(":")[0] for line in lines]
    assert "Request goodput (req/s)" in names
    assert names[-8:-1] == [
        *("P50 TTFT (ms)", "P99 TTFT (ms)"),
        "----------------End-to-end Latency----------------",
        *("Mean E2EL (ms)", "Median E2EL (ms)", "P50 E2EL (ms)", "P99 E2EL (ms)"),
    ]
    assert lines[-1] == "=" * 50


def test_concurrency_is_kept(target: Target) -> None:
    report = measured(target, LoadConfig(max_concurrency=1), replace(AT_ONCE, max_concurrency=3))
    for run, most in zip(report.runs, (1, 3), strict=True):
        timings = run.figures.timings
        overlaps = [
            sum(other.start < each.start < other.token_times[-1] for other in timings)
            for each in timings
        ]
        assert max(overlaps) < most
    table = as_markdown(serve_table(report))
    assert "all at once, at most 1" in table
    assert "all at once, at most 3" in table


def test_requests_leave_at_their_times(target: Target, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 9, "output_length": 2}\n'
        '{"timestamp": 3000, "input_length": 9, "output_length": 2}\n'
    )
    data = DatasetConfig(name="mooncake", path=trace, num_prompts=2, max_request_len=10)
    report = measured(target, LoadConfig(arrival_scale=0.1), data=data)
    assert "the trace's times × 0.1" in as_markdown(serve_table(report))
    assert "multiplied by 0.909" in report.notes[0]
    (run,) = report.runs
    first, second = run.figures.timings
    assert 0.28 < second.start - first.start < 2.5
    (run,) = measured(target, LoadConfig(self_timed=False), data=data).runs
    first, second = run.figures.timings
    assert abs(second.start - first.start) < 2.5


def test_the_prefix_cache_is_told_and_can_be_emptied(target: Target) -> None:
    data = DatasetConfig(num_prompts=4, input_len=64, output_len=2, seed=5)
    measured(target, AT_ONCE, data=data)
    warm = measured(target, AT_ONCE, data=data)
    assert "came from the server's prefix cache" in warm.notes[0]
    assert warm.runs[0].figures.total_cached_tokens == 4 * 48
    cold = measured(target, AT_ONCE, data=data, reset_prefix_cache=True)
    assert not cold.runs[0].figures.total_cached_tokens
    assert not cold.notes


def test_repetitions_ask_other_prompts(target: Target) -> None:
    report = measured(target, AT_ONCE, repetitions=2, num_warmups=1, reset_prefix_cache=True)
    assert len(report.runs) == 2
    assert "±" in as_markdown(serve_table(report))


def test_chat(target: Target) -> None:
    (run,) = measured(replace(target, endpoint=CHAT), AT_ONCE).runs
    assert (run.figures.completed, run.figures.total_output_tokens) == (8, 48)


def test_requests_that_fail_are_counted_and_named(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 2}\n{"prompt": "b", "output_tokens": 9999}\n')
    data = DatasetConfig(name="custom", path=path, num_prompts=2)
    report = measured(target, AT_ONCE, data=data)
    assert (report.runs[0].figures.completed, report.runs[0].figures.failed) == (1, 1)
    assert any(note.startswith("Failed: status 400: ") for note in report.notes)
    with pytest.raises(EngineError, match="No request was answered: status 404"):
        measured(replace(target, model="other"), AT_ONCE)


def test_models_of_the_server(server: LiveServer) -> None:
    address = parse_address(server.url)
    found = find_model(address, None)
    assert (found.name, found.max_model_len) == ("tiny", 512)
    assert Path(found.root).is_dir()
    with pytest.raises(EngineError, match="it serves tiny"):
        find_model(address, "other")
    with pytest.raises(EngineError, match="no list of models"):
        find_model(replace(address, path="/nowhere"), None)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (LoadConfig(max_concurrency=0), "--max-concurrency is 0"),
        (LoadConfig(request_rate=-1), "--request-rate is -1"),
        (LoadConfig(arrival_scale=math.nan), "--arrival-scale"),
    ],
)
def test_loads_that_are_none(target: Target, load: LoadConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        measured(target, load)
