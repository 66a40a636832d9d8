"""How fast, how many: an engine of this process, KV cache precisions side by side, any server."""

from tightkv.benchmark.bench import bench
from tightkv.benchmark.data import DATASETS, BenchRequest, DatasetConfig
from tightkv.benchmark.http_client import parse_address
from tightkv.benchmark.kv import KVReport, bench_kv
from tightkv.benchmark.latency import LatencyReport, LatencySweep, bench_latency
from tightkv.benchmark.serve import (
    CHAT,
    COMPLETIONS,
    LoadConfig,
    ServedModel,
    ServeReport,
    ServeRun,
    Target,
    bench_serve,
    find_model,
)
from tightkv.benchmark.statistics import (
    METRICS,
    Figures,
    RequestTiming,
    parse_goodput,
    parse_percentiles,
    summarize,
)
from tightkv.benchmark.sweep import MeanStd, parse_numbers
from tightkv.benchmark.throughput import ThroughputReport, bench_throughput
from tightkv.engine.arm_spec import parse_arms

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "DATASETS",
    "METRICS",
    "BenchRequest",
    "DatasetConfig",
    "Figures",
    "KVReport",
    "LatencyReport",
    "LatencySweep",
    "LoadConfig",
    "MeanStd",
    "RequestTiming",
    "ServeReport",
    "ServeRun",
    "ServedModel",
    "Target",
    "ThroughputReport",
    "bench",
    "bench_kv",
    "bench_latency",
    "bench_serve",
    "bench_throughput",
    "find_model",
    "parse_address",
    "parse_arms",
    "parse_goodput",
    "parse_numbers",
    "parse_percentiles",
    "summarize",
]
