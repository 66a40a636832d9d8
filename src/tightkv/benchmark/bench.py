"""`bench(kind, ...)`: one name for all kinds of `tightkv bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tightkv.benchmark.kv import KVReport, bench_kv
from tightkv.benchmark.latency import LatencyReport, bench_latency
from tightkv.benchmark.serve import ServeReport, bench_serve
from tightkv.benchmark.throughput import ThroughputReport, bench_throughput
from tightkv.errors import ConfigError

__all__ = ["Report", "bench"]

Report = ThroughputReport | LatencyReport | ServeReport | KVReport

_KINDS: Mapping[str, Callable[..., Any]] = {
    "throughput": bench_throughput,
    "latency": bench_latency,
    "serve": bench_serve,
    "kv": bench_kv,
}


def bench(kind: str, *arguments: Any, **options: Any) -> Report:
    """Measure; the rest is as `bench_throughput`, `bench_latency`, `bench_serve`, `bench_kv` say.

    Example:
        >>> report = bench("kv", "path/to/model", "float16,int8", kv_cache_memory_bytes=2**26)
        >>> report.as_json()

    Raises:
        ConfigError: for another kind.
    """
    if kind not in _KINDS:
        raise ConfigError(f"There is no benchmark {kind!r}: choose one of {', '.join(_KINDS)}.")
    report: Report = _KINDS[kind](*arguments, **options)
    return report
