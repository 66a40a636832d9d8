"""The server's metrics, in the text form that Prometheus reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from statistics import median_low

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from tightkv.metrics.catalogue import CATALOGUE, FINISHED_REASONS, QUALITY_OUTCOMES, Metric
from tightkv.metrics.readings import Reading, read
from tightkv.metrics.request_stats import RequestStats
from tightkv.metrics.snapshot import EngineSnapshot

__all__ = ["ServerMetrics"]

_METRICS = {metric.name: metric for metric in chain.from_iterable(CATALOGUE.values())}
_LABELS = ("engine", "model_name")
_CACHE_CONFIG = "vllm:cache_config_info"
_KNOWN_LABELS = {
    "vllm:request_success": [(reason,) for reason in FINISHED_REASONS],
    "tightkv:quality_watch_requests": [(outcome,) for outcome in QUALITY_OUTCOMES],
}
_TYPICAL_OF = 256
"""Finished requests of which the typical length is the median."""


class ServerMetrics:
    """Counts what happens to requests, and reads the rest from the engine when it is asked.

    The engine's thread calls the `on_` methods, any thread calls `render`.
    """

    def __init__(
        self,
        model_name: str,
        cache_config: Mapping[str, str],
        snapshot: Callable[[], EngineSnapshot],
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Register everything.

        Args:
            model_name: the label that every metric has.
            cache_config: labels of `vllm:cache_config_info`.
            snapshot: gives the engine's state, without waiting; first called at the first scrape.
            registry: to register in; default: a new one, which has the process's figures too.
        """
        if registry is None:
            registry = CollectorRegistry()
            ProcessCollector(registry=registry)
        self._registry = registry
        self._labels = ("0", model_name)
        self._lengths: deque[int] = deque(maxlen=_TYPICAL_OF)
        self._typical_tokens: int | None = None
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in _METRICS.values():
            if not metric.at_scrape:
                self._add(metric)
        registry.register(
            _SnapshotCollector(
                self._labels,
                cache_config,
                lambda: read(snapshot(), cache_config, self._typical_tokens),
            )
        )

    def on_tokens(self, stats: RequestStats, count: int, now: float) -> None:
        """`count` tokens of a request were made at `now`; `stats` does not know it yet."""
        if stats.first_token_time is None or stats.last_token_time is None:
            self._observe("vllm:time_to_first_token_seconds", now - stats.arrival_time)
            return
        for _ in range(count):
            self._observe("vllm:inter_token_latency_seconds", now - stats.last_token_time)
            self._observe("vllm:time_per_output_token_seconds", now - stats.last_token_time)

    def on_finished(self, stats: RequestStats) -> None:
        """A request ended. Times and lengths of one that was aborted or failed are not observed."""
        reason = stats.finished_reason or "error"
        self._count("vllm:request_success", reason)
        if reason not in ("stop", "length"):
            return
        self._observe("vllm:request_prompt_tokens", stats.num_prompt_tokens)
        self._observe("vllm:request_generation_tokens", stats.num_generation_tokens)
        if stats.n == 1:
            self._observe("vllm:request_max_num_generation_tokens", stats.num_generation_tokens)
        self._observe("vllm:request_params_n", stats.n)
        if stats.max_tokens is not None:
            self._observe("vllm:request_params_max_tokens", stats.max_tokens)
        self._lengths.append(stats.num_prompt_tokens + stats.num_generation_tokens)
        self._typical_tokens = median_low(self._lengths)
        self._observe_times(stats)

    def on_step(self, num_tokens: int) -> None:
        """The engine ran a step."""
        self._observe("vllm:iteration_tokens_total", num_tokens)

    def on_rejected(self, reason: str) -> None:
        """A request was not queued; `reason` is one of a few words, never text of the request."""
        self._count("tightkv:requests_rejected", reason)

    def on_repetition_loop(self) -> None:
        """A finished sequence ended in a loop (`has_repetition_loop`)."""
        self._count("tightkv:repetition_loops")

    def on_quality(self, kl: float, same_top: bool) -> None:
        """The quality watch scored a token: KL in nats from full precision, top token the same."""
        self._observe("tightkv:quality_watch_kl_nats", max(0.0, kl))  # rounding gives -1e-17
        self._count("tightkv:quality_watch_tokens")
        if same_top:
            self._count("tightkv:quality_watch_same_top_tokens")

    def on_quality_request(self, outcome: str) -> None:
        """The quality watch is done with a request; `outcome` is one of `QUALITY_OUTCOMES`."""
        self._count("tightkv:quality_watch_requests", outcome)

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """Body and content type of /metrics; `accept` is the request's header of that name."""
        # The client library's own choice fails on versions that are no numbers.
        if accept is not None and "application/openmetrics-text" in accept:
            body: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def _observe_times(self, stats: RequestStats) -> None:
        end, scheduled = stats.finished_time, stats.scheduled_time
        first, last = stats.first_token_time, stats.last_token_time
        if end is None or scheduled is None or first is None or last is None:
            return
        self._observe("vllm:e2e_request_latency_seconds", end - stats.arrival_time)
        self._observe("vllm:request_queue_time_seconds", scheduled - stats.arrival_time)
        self._observe("vllm:request_prefill_time_seconds", first - scheduled)
        self._observe("vllm:request_decode_time_seconds", last - first)
        self._observe("vllm:request_inference_time_seconds", last - scheduled)
        # Completions of one request run side by side: the time is one completion's.
        tokens_each = stats.num_generation_tokens / stats.n
        if tokens_each > 1:
            per_token = (end - first) / (tokens_each - 1)
            self._observe("vllm:request_time_per_output_token_seconds", per_token)

    def _add(self, metric: Metric) -> None:
        labels = (*_LABELS, *metric.labels)
        if metric.kind == "histogram":
            histogram = Histogram(
                metric.name, metric.help, labels, registry=self._registry, buckets=metric.buckets
            )
            self._histograms[metric.name] = histogram.labels(*self._labels)
            return
        self._counters[metric.name] = Counter(
            metric.name, metric.help, labels, registry=self._registry
        )
        # Series that are there from the start, at 0: a rate needs two values.
        for own_labels in _KNOWN_LABELS.get(metric.name, [()] if not metric.labels else []):
            self._counter(metric.name, *own_labels)

    def _counter(self, name: str, *labels: str) -> Counter:
        return self._counters[name].labels(*self._labels, *labels)

    def _count(self, name: str, *labels: str) -> None:
        self._counter(name, *labels).inc()

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


class _SnapshotCollector(Collector):
    """Turns readings into what Prometheus shows."""

    def __init__(
        self,
        labels: tuple[str, str],
        cache_config: Mapping[str, str],
        readings: Callable[[], Iterator[Reading]],
    ) -> None:
        self._labels = labels
        self._readings = readings
        self._metrics = [
            replace(metric, labels=tuple(cache_config)) if metric.name == _CACHE_CONFIG else metric
            for metric in _METRICS.values()
            if metric.at_scrape
        ]

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families = {metric.name: _family(metric) for metric in self._metrics}
        for reading in self._readings():
            families[reading.name].add_metric((*self._labels, *reading.labels), reading.value)
        yield from families.values()


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=(*_LABELS, *metric.labels))
