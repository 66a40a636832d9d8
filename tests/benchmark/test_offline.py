"""Throughput, latency and precisions side by side, on a tiny model in this process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tightkv.benchmark import (
    DatasetConfig,
    LatencySweep,
    MeanStd,
    bench_kv,
    bench_latency,
    bench_throughput,
    parse_arms,
    parse_numbers,
)
from tightkv.benchmark.data import BenchRequest
from tightkv.benchmark.kv_arm import ArmJob, measure_in_process
from tightkv.benchmark.offline import run_load
from tightkv.benchmark.slope import break_even_context, choose_contexts, fit_line
from tightkv.benchmark.tables import as_csv, as_markdown, kv_table, latency_table, throughput_table
from tightkv.errors import ConfigError, RequestError, ScaleError
from tightkv.models import LoadedModel
from tiny_engine import loaded, prompts, tiny_llm
from tiny_models import save_tiny_model

SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return loaded(folder)


def test_every_token_of_a_load_has_a_time(folder: Path) -> None:
    llm = tiny_llm(folder, pool_tokens=160)
    llm.engine.scheduler.num_reserved_tokens = 0  # so that some are preempted
    requests = [BenchRequest(tuple(prompt), 12) for prompt in prompts(6)]
    told: list[tuple[str, int, int]] = []
    load = run_load(llm.engine, requests, lambda *of: told.append(of), "some")
    assert [len(timing.token_times) for timing in load.timings] == [12] * 6
    for timing, request in zip(load.timings, requests, strict=True):
        assert (timing.prompt_tokens, timing.output_tokens) == (len(request.token_ids), 12)
        assert timing.start < timing.token_times[0]
        assert sorted(timing.token_times) == [*timing.token_times]
    assert told[-1] == ("some", 72, 72)
    assert load.preemptions == llm.engine.stats.num_preemptions > 0
    assert 1 < load.mean_running <= load.peak_running <= 4
    assert not llm.engine.requests


def test_a_request_that_cannot_be_served_leaves_nothing_behind(folder: Path) -> None:
    llm = tiny_llm(folder)
    requests = [BenchRequest((1, 2, 3), 4), BenchRequest((999,), 4)]
    with pytest.raises(RequestError, match="token id 999"):
        run_load(llm.engine, requests)
    assert not llm.engine.requests


def test_throughput(model: LoadedModel) -> None:
    data = DatasetConfig(num_prompts=6, input_len=20, output_len=8)
    report = bench_throughput(
        model, "float16,int8", data, repetitions=2, kv_cache_memory_bytes=64 << 10, **SMALL
    )
    assert [row.kv_cache_dtype for row in report.rows] == ["float16", "int8"]
    wide, narrow = report.rows
    assert narrow.pool_tokens > 1.5 * wide.pool_tokens
    for row in report.rows:
        assert (row.num_prompt_tokens, row.num_output_tokens) == (120, 48)
        assert len(row.seconds.samples) == len(row.runs) == 2
        assert row.tokens_per_second.mean == pytest.approx(3.5 * row.output_tokens_per_second.mean)
        # New random tokens each time, and an empty prefix cache.
        assert all(run.total_cached_tokens == 0 for run in row.runs)
    document = report.as_json()["rows"][1]
    assert document["total_num_tokens"] == 168
    assert document["avg_ts"] == document["output_tokens_per_second"]
    assert "| int8 |" in as_markdown(throughput_table(report))


def test_latency_at_depths(model: LoadedModel) -> None:
    sweep = LatencySweep(
        batch_sizes=(1, 2), input_lens=(8,), output_lens=(6, 1), depths=(0, 32), repetitions=2
    )
    report = bench_latency(model, ["int8"], sweep, kv_cache_memory_bytes=64 << 10, **SMALL)
    assert [(row.depth, row.batch_size, row.output_len) for row in report.rows] == [
        (depth, batch, output) for depth in (0, 32) for batch in (1, 2) for output in (6, 1)
    ]
    for row in report.rows:
        assert (row.decode is None) == (row.output_len == 1)
        assert row.prefill.mean > 0
        assert row.latency.mean > 0
        # Prompt and answer together are the batch's time; their parts must agree with it.
        seconds = row.batch_size * 8 / row.prefill.samples[0]
        assert seconds <= row.latency.samples[0] * 1.01
    table = as_markdown(latency_table(report))
    assert "pp8+tg6 @ d32" in table
    lines = as_csv(report.as_json()["rows"]).splitlines()
    assert lines[0].startswith("kv_cache_dtype,n_depth,batch_size,n_prompt,n_gen,avg_latency,")
    assert len(lines) == 9


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"depths": (0, 8)}, "multiples of the block size"),
        ({"batch_sizes": (5,)}, "more than --max-num-seqs"),
        ({"output_lens": (300,)}, "longer than the 256"),
        ({"batch_sizes": (4,), "input_lens": (200,)}, "does not fit"),
    ],
)
def test_batches_that_cannot_be_measured(
    model: LoadedModel, settings: dict[str, Any], said: str
) -> None:
    sweep = LatencySweep(**{"batch_sizes": (1,), "output_lens": (4,), **settings})
    with pytest.raises(ConfigError, match=said):
        bench_latency(model, "auto", sweep, kv_cache_memory_bytes=200 << 10, **SMALL)


def test_precisions_side_by_side(model: LoadedModel) -> None:
    """What is planned without weights is what each has allocated."""
    report = bench_kv(
        model, "float16,int8/fp8_e4m3", input_len=24, output_len=40, max_model_len=256
    )
    wide, narrow = report.rows
    assert report.pool_bytes == 4 * 64 * 256  # four requests of 64 tokens, 256 bytes a token
    assert report.num_prompts == 14  # twice what the second holds
    for row in report.rows:
        assert row.result.pool_tokens == row.predicted.pool_tokens
        assert row.result.pool_bytes == row.predicted.pool_bytes
        assert row.result.bytes_per_token == row.predicted.bytes_per_token
        assert row.result.figures["total_output_tokens"] == 14 * 40
        assert row.result.itl is not None
        assert row.result.itl.contexts[-1] < row.predicted.longest
        assert row.result.peak_bytes > 50 << 20
    assert (wide.result.max_requests, narrow.result.max_requests) == (4.0, 7.0)
    assert report.ratios(narrow)["pool_tokens"] == 1.75
    assert (wide.result.k_format, wide.break_even) == ("float16", None)
    assert narrow.result.k_format.startswith("int8")
    assert narrow.result.v_format.startswith("fp8_e4m3")
    table = as_markdown(kv_table(report))
    assert "| pool, tokens | 256 | 448 (1.75 ×) |" in table
    assert "| requests of 64 tokens that fit | 4.00 | 7.00 |" in table
    rows = report.as_json()["rows"]
    assert as_csv(rows).splitlines()[0].startswith("kv_cache_dtype,k_format,v_format,")


def test_requests_of_a_model_with_windows_are_counted_by_what_they_hold(tmp_path: Path) -> None:
    """Five of six layers hold 16 tokens of a request, so that more fit than tokens say."""
    kinds = [*["sliding_attention"] * 5, "full_attention"]
    shape = {"num_hidden_layers": 6, "layer_types": kinds, "sliding_window": 16}
    folder = save_tiny_model(tmp_path / "gemma", "gemma3_text", **shape)
    options: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 16,
    }
    report = bench_kv(
        loaded(folder),
        "float16,int8",
        input_len=24,
        output_len=200,
        measure_slope=False,
        **options,
    )
    wide, narrow = report.rows
    for row in report.rows:
        assert row.predicted.max_requests == pytest.approx(row.result.max_requests)
        assert row.result.pool_bytes == row.predicted.pool_bytes
        assert row.result.max_requests > 1.5 * row.result.pool_tokens / 224
    # The default pool has room for four in the first precision, and that is what it holds.
    assert wide.result.max_requests == pytest.approx(4)
    assert 3.5 < wide.result.mean_running < 5
    assert report.num_prompts == 2 * math.ceil(narrow.result.max_requests)


def test_contexts_end_at_the_longest_request_that_may_be_asked_for(model: LoadedModel) -> None:
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 20}
    (row,) = bench_kv(model, "int8", num_prompts=2, input_len=8, output_len=8, **options).rows
    assert row.predicted.longest == 256
    assert row.result.itl is not None
    assert row.result.itl.contexts[-1] < 256


@pytest.mark.slow
def test_a_process_for_each_precision(folder: Path) -> None:
    told: list[str] = []
    settings: dict[str, Any] = {"input_len": 24, "output_len": 40, "max_model_len": 256}
    report = bench_kv(
        str(folder), "float16,int8", progress=lambda stage, *_: told.append(stage), **settings
    )
    for row in report.rows:
        assert row.result.pool_bytes == row.predicted.pool_bytes
        assert row.result.figures["completed"] == report.num_prompts
        assert row.result.peak_is_since_load
        assert 50 << 20 < row.result.peak_bytes < 4 << 30
    assert {"float16: loading", "int8: 14 requests", "int8: decode steps"} <= {*told}


@pytest.mark.slow
def test_the_process_hands_its_error_back(folder: Path, tmp_path: Path) -> None:
    job = ArmJob(
        options={"model": str(folder)},
        arm=f"int8@{tmp_path / 'no.json'}",
        num_prompts=1,
        input_len=4,
        output_len=4,
        contexts=(),
        percentiles=(),
        seed=0,
        threads=1,
    )
    with pytest.raises(ScaleError, match=r"no\.json"):
        measure_in_process(job)


@pytest.mark.parametrize(
    ("precisions", "settings", "said"),
    [
        ("int9", {}, "no KV cache dtype"),
        ("int8,int8", {}, "twice"),
        ("int8", {"kv_cache_dtype": "int8"}, "kv_cache_dtype is not taken here"),
        ("int8", {"num_prompts": 0}, "--num-prompts is 0"),
        ("int8", {"input_len": 600}, "longer than the 512"),
        ("int8", {"kv_cache_memory_bytes": 9216}, "longer than the 64"),
    ],
)
def test_precisions_that_cannot_be_measured(
    folder: Path, precisions: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        bench_kv(str(folder), precisions, **{"input_len": 60, "output_len": 10, **settings})


def test_lines_and_where_they_cross() -> None:
    base = fit_line([0, 1000, 2000], [0.010, 0.012, 0.014])
    assert base.slope == pytest.approx(2e-6)
    assert base.intercept == pytest.approx(0.010)
    narrow = fit_line([0, 1000, 2000], [0.011, 0.012, 0.013])
    assert break_even_context(narrow, base) == pytest.approx(1000)
    assert break_even_context(base, narrow) is None
    assert break_even_context(fit_line([0, 1000], [0.009, 0.010]), base) == 0.0


def test_contexts_leave_room_for_steps() -> None:
    assert choose_contexts(100) == ()
    contexts = choose_contexts(2912)
    assert len(contexts) == 5
    assert contexts[0] == 64
    assert contexts[-1] == 2900


def test_means_and_lists() -> None:
    assert str(MeanStd((1.0, 2.0, 3.0))) == "2.00 ± 1.00"
    assert str(MeanStd((1.0,))) == "1.00"
    assert parse_numbers("--depth", "0,4096", least=0) == (0, 4096)
    assert [arm.path for arm in parse_arms("int8@a.json,auto")] == ["a.json", None]
    for text in ("", "1,", "-1", "a"):
        with pytest.raises(ConfigError, match="--depth"):
            parse_numbers("--depth", text, least=0)
