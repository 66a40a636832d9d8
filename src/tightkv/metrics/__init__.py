"""What is counted while serving, and measures of quality."""

from tightkv.metrics.divergence import Divergence, DivergenceFigures, Spread, kl_divergence
from tightkv.metrics.request_stats import RequestStats
from tightkv.metrics.snapshot import (
    EngineSnapshot,
    GroupSnapshot,
    LayerSnapshot,
    PoolSnapshot,
    RequestSnapshot,
    SwapSnapshot,
    TensorSnapshot,
)
from tightkv.metrics.stats import EngineStats

__all__ = [
    "Divergence",
    "DivergenceFigures",
    "EngineSnapshot",
    "EngineStats",
    "GroupSnapshot",
    "LayerSnapshot",
    "PoolSnapshot",
    "RequestSnapshot",
    "RequestStats",
    "Spread",
    "SwapSnapshot",
    "TensorSnapshot",
    "kl_divergence",
]
