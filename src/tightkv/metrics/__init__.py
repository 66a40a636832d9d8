"""What is counted while serving, and measures of quality."""

from tightkv.metrics.divergence import Divergence, kl_divergence
from tightkv.metrics.stats import EngineStats

__all__ = ["Divergence", "EngineStats", "kl_divergence"]
