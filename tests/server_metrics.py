"""A `ServerMetrics` that has seen everything once, and what it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from tightkv.metrics import (
    EngineSnapshot,
    EngineStats,
    GroupSnapshot,
    LayerSnapshot,
    PoolSnapshot,
    RequestStats,
    SwapSnapshot,
    TensorSnapshot,
)
from tightkv.metrics.prometheus import ServerMetrics

BASE = {"engine": "0", "model_name": "tiny"}

_K = TensorSnapshot(
    format="int8",
    granularity="two_factor",
    source="probe",
    block_bytes=600,
    bits=8.125,
    clip_rate=0.0,
)
_V = replace(_K, format="fp8_e4m3", granularity="tensor", source="scales.json", bits=8.0)
_WIDE = replace(
    _K, format="float16", granularity="none", source="none", block_bytes=1000, bits=16.0
)

SNAPSHOT = EngineSnapshot(
    stats=EngineStats(
        prompt_tokens=70,
        generation_tokens=30,
        prefix_cache_queries=100,
        prefix_cache_hits=32,
        num_preemptions=2,
        num_preempted_tokens=41,
        num_swaps=7,
        num_swap_fallbacks=1,
        num_swapped_out_blocks=9,
        num_swapped_in_blocks=8,
        num_fetched_tokens=48,
    ),
    num_running=3,
    num_waiting=5,
    block_size=16,
    num_blocks=8,
    num_free_blocks=5,
    max_model_len=40,
    weight_bytes=1000,
    peak_bytes=200,
    total_bytes=None,
    bytes_per_token=325.0,
    requests_that_fit=lambda num_tokens: 5 / (2 * -(-num_tokens // 16)),
    layers=(
        LayerSnapshot(layer_idx=0, group=0, k=_K, v=_V),
        LayerSnapshot(layer_idx=1, group=0, k=replace(_K, clip_rate=0.25), v=_V),
        LayerSnapshot(layer_idx=2, group=1, k=_WIDE, v=_WIDE),
    ),
    groups=(
        GroupSnapshot(sliding_window=None, num_used_blocks=2),
        GroupSnapshot(sliding_window=512, num_used_blocks=1),
    ),
    pool=PoolSnapshot(block_bytes=2400, blocks="..us..uc"),
    swap=SwapSnapshot(
        num_slots=20, slot_bytes=2400, num_used_slots=5, num_kept_slots=3, num_sequences=2
    ),
)

FINISHED = RequestStats(
    arrival_time=100.0,
    num_prompt_tokens=20,
    max_tokens=64,
    scheduled_time=100.5,
    first_token_time=101.0,
    last_token_time=103.0,
    finished_time=103.0,
    num_generation_tokens=5,
    finished_reason="stop",
)


def server_metrics(snapshot: Callable[[], EngineSnapshot] = lambda: SNAPSHOT) -> ServerMetrics:
    return ServerMetrics("tiny", {"block_size": "16", "cache_dtype": "int8"}, snapshot)


def busy_metrics() -> ServerMetrics:
    """All events have happened."""
    metrics = server_metrics()
    metrics.on_tokens(replace(FINISHED, first_token_time=None, last_token_time=None), 1, 101.0)
    metrics.on_tokens(FINISHED, 2, 103.5)
    metrics.on_step(21)
    metrics.on_finished(FINISHED)
    metrics.on_rejected("queue_full")
    metrics.on_repetition_loop()
    metrics.on_quality(0.002, same_top=True)
    metrics.on_quality(-1e-17, same_top=False)
    metrics.on_quality_request("scored")
    return metrics


def samples(metrics: ServerMetrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    """By series name, labels (but those of all) and value, as a scraper reads them."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k not in BASE}
            found.setdefault(sample.name, []).append((own, sample.value))
    return found


def value(metrics: ServerMetrics, series: str, **labels: str) -> float:
    """The one value with exactly these labels."""
    values = [v for own, v in samples(metrics).get(series, []) if own == labels]
    assert len(values) == 1, f"{series} {labels} has {len(values)} values"
    return values[0]
