"""Every metric of /metrics: name, kind, labels, buckets, meaning.

Those under `vllm:` have vLLM's names, labels and buckets, so that boards made for it work.
docs/metrics.md is made from this table, and the collectors too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CATALOGUE", "FINISHED_REASONS", "QUALITY_OUTCOMES", "Metric"]

Kind = Literal["counter", "gauge", "histogram"]

FINISHED_REASONS = ("stop", "length", "abort", "error")
QUALITY_OUTCOMES = ("scored", "dropped", "too_long", "failed")
"""What became of a request that the quality watch had sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. All have the labels `engine` and `model_name` besides their own.

    Attributes:
        name: as a client library wants it: a counter without its `_total`.
        at_scrape: read from the engine's snapshot when asked for, not counted event by event.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    at_scrape: bool = False
    buckets: tuple[float, ...] = ()

    @property
    def series(self) -> str:
        """The name under which Prometheus finds it; a histogram has `_bucket`, `_sum`, `_count`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_STEP_TOKENS = (1.0, *(8.0 * 2**power for power in range(12)))
_COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)
_KL_NATS = tuple(step * 10.0**power for power in range(-6, 1) for step in (1, 3))


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", help=help, labels=labels, at_scrape=True)


def _engine_counter(name: str, help: str) -> Metric:
    return Metric(name=name, kind="counter", help=help, at_scrape=True)


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name=name, kind="counter", help=help, labels=labels)


def _histogram(name: str, buckets: tuple[float, ...], help: str) -> Metric:
    return Metric(name=name, kind="histogram", help=help, buckets=buckets)


_TRAFFIC = (
    _gauge("vllm:num_requests_running", "Sequences in the running batch"),
    _gauge("vllm:num_requests_waiting", "Sequences that wait for room"),
    _engine_counter("vllm:prompt_tokens", "Prompt tokens computed"),
    _engine_counter("vllm:generation_tokens", "Tokens made"),
    _counter(
        "vllm:request_success",
        "Finished requests, by what ended them",
        "finished_reason",
    ),
    _counter("tightkv:requests_rejected", "Requests that were not queued, by reason", "reason"),
    _histogram("vllm:request_prompt_tokens", _TOKENS, "Prompt tokens of a request"),
    _histogram(
        "vllm:request_generation_tokens", _TOKENS, "Tokens made for a request, all completions"
    ),
    _histogram(
        "vllm:request_max_num_generation_tokens",
        _TOKENS,
        "Tokens of a request's longest completion; only of requests with n = 1",
    ),
    _histogram("vllm:request_params_n", _COMPLETIONS, "Completions that a request asked for"),
    _histogram(
        "vllm:request_params_max_tokens", _TOKENS, "max_tokens of the requests that gave one"
    ),
    _histogram("vllm:iteration_tokens_total", _STEP_TOKENS, "Tokens in one step of the engine"),
)

_LATENCY = (
    _histogram(
        "vllm:time_to_first_token_seconds", _FIRST_TOKEN_SECONDS, "From arrival to the first token"
    ),
    _histogram(
        "vllm:inter_token_latency_seconds", _TOKEN_SECONDS, "From one token to the next (ITL)"
    ),
    _histogram(
        "vllm:time_per_output_token_seconds",
        _TOKEN_SECONDS,
        "Older name of vllm:inter_token_latency_seconds",
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        _TOKEN_SECONDS,
        "A request's mean time per token after the first: (e2e - TTFT) / (n - 1) (TPOT)",
    ),
    _histogram("vllm:e2e_request_latency_seconds", _REQUEST_SECONDS, "From arrival to the end"),
    _histogram(
        "vllm:request_queue_time_seconds", _REQUEST_SECONDS, "From arrival to the first step"
    ),
    _histogram(
        "vllm:request_prefill_time_seconds",
        _REQUEST_SECONDS,
        "From the first step to the first token",
    ),
    _histogram(
        "vllm:request_decode_time_seconds",
        _REQUEST_SECONDS,
        "From the first token to the last one",
    ),
    _histogram(
        "vllm:request_inference_time_seconds",
        _REQUEST_SECONDS,
        "From the first step to the last token",
    ),
)

_CACHE = (
    _gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, from 0 to 1"),
    _gauge("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc"),
    _gauge("vllm:cache_config_info", "Always 1; the settings of the cache are its labels"),
    _engine_counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    _engine_counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    _engine_counter("vllm:num_preemptions", "Sequences that lost their blocks"),
    _engine_counter(
        "tightkv:preempted_tokens", "Computed tokens that preemption threw away, to be made again"
    ),
    _gauge(
        "tightkv:requests_that_fit",
        "Further requests of typical length for which there are free blocks now",
    ),
    _gauge(
        "tightkv:typical_request_tokens",
        "Median of prompt and answer together over the last 256 finished requests; before the "
        "first one, the longest that is served",
    ),
    _gauge(
        "tightkv:memory_bytes",
        "Bytes as planned: weights, activations (a step's intermediate results), kv_cache",
        "part",
    ),
)

_SWAP = (
    _gauge(
        "vllm:num_requests_swapped",
        "Sequences whose blocks are in the swap space; vllm:num_requests_waiting counts them, too",
    ),
    _gauge(
        "vllm:cpu_cache_usage_perc",
        "Share of the swap space that holds blocks of preempted sequences, from 0 to 1",
    ),
    _gauge(
        "tightkv:swap_space_bytes",
        "Bytes of the swap space by what they hold: sequences (preempted ones), prefixes (which "
        "the prefix cache gave up), nothing",
        "holds",
    ),
    _engine_counter("tightkv:swaps", "Preempted sequences whose blocks were moved"),
    _engine_counter(
        "tightkv:swap_fallbacks",
        "Sequences to be moved out or back that are computed anew: no room, or a copy failed",
    ),
    _engine_counter(
        "tightkv:swap_out_blocks", "Blocks copied to the swap space; one of each layer group counts"
    ),
    _engine_counter("tightkv:swap_in_blocks", "Blocks copied back"),
    _engine_counter("tightkv:swap_out_bytes", "Bytes of the blocks copied to the swap space"),
    _engine_counter("tightkv:swap_in_bytes", "Bytes of the blocks copied back"),
    _engine_counter(
        "tightkv:swap_fetched_tokens",
        "Tokens that the prefix cache had lost and the swap space had kept",
    ),
)

_FORMATS = (
    _gauge(
        "tightkv:kv_cache_allocated_bytes",
        "Bytes of the pool by format of K and of V, as those of a token; their sum is the pool",
        *("format", "tensor"),
    ),
    _gauge(
        "tightkv:kv_cache_used_bytes",
        "Bytes of the blocks in use by format of K and of V",
        *("format", "tensor"),
    ),
    _gauge("tightkv:kv_cache_bytes_per_token", "KV bytes of one token in all layers"),
    _gauge(
        "tightkv:kv_cache_effective_bits",
        "Bits per value of K and of V over all layers, scales and padding included",
        "tensor",
    ),
    _gauge(
        "tightkv:kv_cache_clip_ratio",
        "Share of the values written so far that were clipped, in the layer of the group where it "
        "is largest; a group is full, or window_N",
        *("group", "tensor"),
    ),
    _gauge(
        "tightkv:kv_cache_layer_clip_ratio",
        "Share of a layer's values written so far that were clipped",
        *("layer", "group", "tensor"),
    ),
    _gauge(
        "tightkv:kv_cache_scale_source_info",
        "Always 1; says from where the scales of neighbouring layers come",
        *("layers", "tensor", "format", "granularity", "source"),
    ),
)

_QUALITY = (
    _counter(
        "tightkv:repetition_loops",
        "Finished sequences whose end repeats a few tokens over and over",
    ),
    _counter(
        "tightkv:quality_watch_requests",
        "Sampled requests by outcome: scored, dropped (the queue was full), too_long, failed",
        "outcome",
    ),
    _counter("tightkv:quality_watch_tokens", "Tokens scored with the served KV formats"),
    _counter(
        "tightkv:quality_watch_same_top_tokens",
        "Scored tokens whose most probable token is that of the full-precision cache",
    ),
    _histogram(
        "tightkv:quality_watch_kl_nats",
        _KL_NATS,
        "KL divergence of a token's distribution from that with the full-precision cache",
    ),
)

CATALOGUE: dict[str, tuple[Metric, ...]] = {
    "Traffic": _TRAFFIC,
    "Latency": _LATENCY,
    "KV cache": _CACHE,
    "Swap space": _SWAP,
    "Formats, scales and clipping": _FORMATS,
    "Quality": _QUALITY,
}
"""The metrics by section, in the order of docs/metrics.md."""
