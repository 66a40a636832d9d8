"""The two kernels: write K and V into the paged cache, and attend over it."""

from tightkv.kernels.arguments import AttentionBatch, AttentionParams, LayerCache
from tightkv.kernels.cpu import WEIGHT_DTYPES, CpuBackend, WeightPanels
from tightkv.kernels.ops import Backend, paged_attention, reshape_and_cache, select_backend

__all__ = [
    "WEIGHT_DTYPES",
    "AttentionBatch",
    "AttentionParams",
    "Backend",
    "CpuBackend",
    "LayerCache",
    "WeightPanels",
    "paged_attention",
    "reshape_and_cache",
    "select_backend",
]
