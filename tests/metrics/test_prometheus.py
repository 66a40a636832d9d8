"""What /metrics shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from server_metrics import BASE, FINISHED, SNAPSHOT, busy_metrics, samples, server_metrics, value
from tightkv.engine.snapshot import take_snapshot
from tightkv.metrics import RequestStats
from tightkv.metrics.catalogue import CATALOGUE, Metric
from tightkv.metrics.prometheus import ServerMetrics
from tiny_engine import GREEDY, prompts, tiny_llm, token_ids
from tiny_models import save_tiny_model

METRICS = [metric for section in CATALOGUE.values() for metric in section]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: str(metric.name))
def test_every_metric_is_shown_as_the_catalogue_says(metric: Metric) -> None:
    metrics = busy_metrics()
    names = _series(metric)
    shown = samples(metrics)
    labels = set(metric.labels) | ({"le"} if metric.kind == "histogram" else set())
    for name in names:
        assert name in shown, f"{name} is not shown"
        if metric.name != "vllm:cache_config_info":
            expected = labels if name.endswith("_bucket") else set(metric.labels)
            assert all(set(own) == expected for own, _ in shown[name])
    assert f"# HELP {metric.series} {metric.help}" in metrics.render()[0].decode()


def test_nothing_is_shown_that_the_catalogue_lacks() -> None:
    known = {name for metric in METRICS for name in _series(metric)}
    ours = {name for name in samples(busy_metrics()) if ":" in name}
    assert {name for name in ours if not name.endswith("_created")} == known


def test_all_have_engine_and_model() -> None:
    lines = busy_metrics().render()[0].decode().splitlines()
    for line in lines:
        if line.startswith(("vllm:", "tightkv:")):
            assert all(f'{name}="{label}"' in line for name, label in BASE.items()), line


def test_buckets_are_those_of_vllm() -> None:
    metrics = server_metrics()

    def bounds(name: str) -> str:
        return " ".join(own["le"] for own, _ in samples(metrics)[f"{name}_bucket"])

    assert bounds("vllm:time_to_first_token_seconds") == (
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 "
        "80.0 160.0 640.0 2560.0 +Inf"
    )
    itl = (
        "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 "
        "+Inf"
    )
    assert bounds("vllm:inter_token_latency_seconds") == itl
    assert bounds("vllm:request_time_per_output_token_seconds") == itl
    assert bounds("vllm:e2e_request_latency_seconds") == (
        "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 "
        "960.0 1920.0 7680.0 +Inf"
    )
    assert bounds("vllm:iteration_tokens_total").startswith("1.0 8.0 16.0 32.0 64.0 128.0 256.0")
    assert bounds("vllm:request_prompt_tokens").startswith("1.0 2.0 5.0 10.0 20.0 50.0 100.0")


def test_counts_of_the_engine() -> None:
    metrics = server_metrics()
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 5,
        "vllm:kv_cache_usage_perc": 0.375,
        "vllm:gpu_cache_usage_perc": 0.375,
        "vllm:prompt_tokens_total": 70,
        "vllm:generation_tokens_total": 30,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:prefix_cache_hits_total": 32,
        "vllm:num_preemptions_total": 2,
        "tightkv:preempted_tokens_total": 41,
        "tightkv:kv_cache_bytes_per_token": 325,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    assert value(metrics, "vllm:cache_config_info", block_size="16", cache_dtype="int8") == 1
    assert value(metrics, "tightkv:memory_bytes", part="kv_cache") == 8 * 2400


def test_swap_space() -> None:
    metrics = server_metrics()
    expected = {
        "vllm:num_requests_swapped": 2,
        "vllm:cpu_cache_usage_perc": 0.25,
        "tightkv:swaps_total": 7,
        "tightkv:swap_fallbacks_total": 1,
        "tightkv:swap_out_blocks_total": 9,
        "tightkv:swap_in_blocks_total": 8,
        "tightkv:swap_out_bytes_total": 9 * 2400,
        "tightkv:swap_in_bytes_total": 8 * 2400,
        "tightkv:swap_fetched_tokens_total": 48,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    for holds, num_slots in {"sequences": 5, "prefixes": 3, "nothing": 12}.items():
        assert value(metrics, "tightkv:swap_space_bytes", holds=holds) == num_slots * 2400


def test_bytes_by_format() -> None:
    metrics = server_metrics()
    allocated, used = "tightkv:kv_cache_allocated_bytes", "tightkv:kv_cache_used_bytes"
    # A token takes 2400 bytes of the first group and 2000 of the second.
    share = pytest.approx(8 * 2400 * 1200 / 4400)
    assert value(metrics, allocated, format="int8", tensor="k") == share
    assert value(metrics, allocated, format="fp8_e4m3", tensor="v") == share
    share = pytest.approx(8 * 2400 * 1000 / 4400)
    assert value(metrics, allocated, format="float16", tensor="v") == share
    assert value(metrics, used, format="int8", tensor="k") == 2 * 2 * 600
    assert value(metrics, used, format="float16", tensor="k") == 1000
    # Of 1800 bytes of K per block id, 1200 at 8.125 and 1000 at 16 bits per value.
    bits = 8 * 2200 / (8 * 1200 / 8.125 + 8 * 1000 / 16)
    assert value(metrics, "tightkv:kv_cache_effective_bits", tensor="k") == pytest.approx(bits)


def test_clips_and_scales() -> None:
    metrics = server_metrics()
    assert value(metrics, "tightkv:kv_cache_clip_ratio", group="full", tensor="k") == 0.25
    assert value(metrics, "tightkv:kv_cache_clip_ratio", group="window_512", tensor="k") == 0
    layer = {"layer": "1", "group": "full", "tensor": "k"}
    assert value(metrics, "tightkv:kv_cache_layer_clip_ratio", **layer) == 0.25
    sources = [own for own, _ in samples(metrics)["tightkv:kv_cache_scale_source_info"]]
    assert {(own["layers"], own["tensor"], own["source"]) for own in sources} == {
        ("0-1", "k", "probe"),
        ("0-1", "v", "scales.json"),
        ("2", "k", "none"),
        ("2", "v", "none"),
    }


def test_times_of_a_request() -> None:
    metrics = busy_metrics()
    expected = {
        "vllm:time_to_first_token_seconds": 1.0,
        "vllm:inter_token_latency_seconds": 2 * 0.5,  # two tokens, each half a second later
        "vllm:e2e_request_latency_seconds": 3.0,
        "vllm:request_queue_time_seconds": 0.5,
        "vllm:request_prefill_time_seconds": 0.5,
        "vllm:request_decode_time_seconds": 2.0,
        "vllm:request_inference_time_seconds": 2.5,
        "vllm:request_time_per_output_token_seconds": (3.0 - 1.0) / 4,
        "vllm:request_prompt_tokens": 20,
        "vllm:request_generation_tokens": 5,
        "vllm:request_max_num_generation_tokens": 5,
        "vllm:request_params_n": 1,
        "vllm:request_params_max_tokens": 64,
        "vllm:iteration_tokens_total": 21,
    }
    assert {name: value(metrics, f"{name}_sum") for name in expected} == expected
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 2


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_aborted_request_is_counted_and_its_times_are_not(reason: str) -> None:
    metrics = server_metrics()
    metrics.on_finished(RequestStats(arrival_time=1, num_prompt_tokens=7, finished_reason=reason))
    assert value(metrics, "vllm:request_success_total", finished_reason=reason) == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 0
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 0
    assert value(metrics, "vllm:request_prompt_tokens_count") == 0


def test_a_single_token_has_no_time_per_token() -> None:
    metrics = server_metrics()
    metrics.on_finished(replace(FINISHED, num_generation_tokens=1))
    metrics.on_finished(replace(FINISHED, num_generation_tokens=3, n=3))
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "vllm:request_decode_time_seconds_count") == 2


def test_requests_that_still_fit() -> None:
    metrics = server_metrics()
    fit = "tightkv:requests_that_fit"
    # None has finished: 40 tokens, in blocks of 16, in two groups.
    assert value(metrics, fit) == 5 // 6
    for num_prompt_tokens in (9, 11, 500):
        metrics.on_finished(replace(FINISHED, num_prompt_tokens=num_prompt_tokens))
    assert value(metrics, "tightkv:typical_request_tokens") == 11 + 5
    assert value(metrics, fit) == 5 // 2
    for _ in range(256):
        metrics.on_finished(replace(FINISHED, num_prompt_tokens=12))
    assert value(metrics, "tightkv:typical_request_tokens") == 17
    assert value(metrics, fit) == 5 // 4


def test_quality() -> None:
    metrics = busy_metrics()
    assert value(metrics, "tightkv:quality_watch_tokens_total") == 2
    assert value(metrics, "tightkv:quality_watch_same_top_tokens_total") == 1
    assert value(metrics, "tightkv:quality_watch_kl_nats_sum") == pytest.approx(0.002)
    assert value(metrics, "tightkv:quality_watch_kl_nats_bucket", le="1e-06") == 1
    assert value(metrics, "tightkv:quality_watch_requests_total", outcome="scored") == 1
    assert value(metrics, "tightkv:quality_watch_requests_total", outcome="failed") == 0
    assert value(metrics, "tightkv:requests_rejected_total", reason="queue_full") == 1
    assert value(metrics, "tightkv:repetition_loops_total") == 1


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "text/plain"),
        ("*/*", "text/plain"),
        ("text/plain; version=nonsense", "text/plain"),
        ("application/openmetrics-text; version=1.0.0, */*", "application/openmetrics-text"),
        ("application/openmetrics-text; version=nonsense", "application/openmetrics-text"),
    ],
)
def test_content_type(accept: str | None, expected: str) -> None:
    body, content_type = busy_metrics().render(accept)
    assert content_type.startswith(expected)
    assert body.endswith(b"# EOF\n") == ("openmetrics" in expected)


def test_a_registry_of_ones_own_and_a_look_at_each_scrape() -> None:
    looks = iter([SNAPSHOT, replace(SNAPSHOT, num_running=9)])
    registry = CollectorRegistry()
    metrics = ServerMetrics("tiny", {}, lambda: next(looks), registry)
    labels = {"engine": "0", "model_name": "tiny"}
    assert registry.get_sample_value("vllm:num_requests_running", labels) == 3
    assert b'vllm:num_requests_running{engine="0",model_name="tiny"} 9.0' in metrics.render()[0]


def test_the_bytes_of_a_real_engine_add_up_to_its_pool(tmp_path: Path) -> None:
    llm = tiny_llm(
        save_tiny_model(tmp_path / "gemma", "gemma3_text"),
        k_cache_dtype="int8",
        v_cache_dtype="fp8_e4m3",
        kv_cache_dtype_skip_layers=("1",),
    )
    token_ids(llm, prompts(2))
    engine = llm.engine
    engine.add_request("open", prompts(1)[0], GREEDY)
    engine.step()
    snapshot = take_snapshot(engine)
    metrics = server_metrics(lambda: snapshot)
    allocated = samples(metrics)["tightkv:kv_cache_allocated_bytes"]
    assert {own["format"] for own, _ in allocated} == {"int8", "fp8_e4m3", "float32"}
    assert engine.plan.pool_bytes == engine.storage.num_bytes
    assert sum(v for _, v in allocated) == pytest.approx(engine.plan.pool_bytes)
    used = sum(v for _, v in samples(metrics)["tightkv:kv_cache_used_bytes"])
    blocks = zip(engine.storage.groups, engine.manager.num_used_blocks(), strict=True)
    assert used == sum(group.block_bytes * count for group, count in blocks) > 0
    num_used = engine.manager.num_blocks - engine.manager.num_free_blocks
    assert sum(engine.manager.num_used_blocks()) == num_used


def _series(metric: Metric) -> Iterator[str]:
    if metric.kind == "histogram":
        yield from (f"{metric.name}{suffix}" for suffix in ("_bucket", "_sum", "_count"))
    else:
        yield metric.series
