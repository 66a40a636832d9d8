"""What is counted while serving, and measures of quality."""

from tightkv.metrics.divergence import Divergence, kl_divergence
from tightkv.metrics.request_stats import RequestStats
from tightkv.metrics.snapshot import (
    EngineSnapshot,
    LayerSnapshot,
    PoolSnapshot,
    RequestSnapshot,
    TensorSnapshot,
)
from tightkv.metrics.stats import EngineStats

__all__ = [
    "Divergence",
    "EngineSnapshot",
    "EngineStats",
    "LayerSnapshot",
    "PoolSnapshot",
    "RequestSnapshot",
    "RequestStats",
    "TensorSnapshot",
    "kl_divergence",
]
