"""The two kernels: write K and V into the paged cache, and attend over it."""

from tightkv.kernels.arguments import AttentionBatch, AttentionParams, LayerCache, LayerStep
from tightkv.kernels.capability import COMPILED_CAPABILITY, converts_fp8
from tightkv.kernels.cpu import CpuBackend
from tightkv.kernels.ops import Backend, paged_attention, reshape_and_cache, select_backend
from tightkv.kernels.weights import WEIGHT_DTYPES, DecoderLayerWeights, Product, WeightPanels

__all__ = [
    "COMPILED_CAPABILITY",
    "WEIGHT_DTYPES",
    "AttentionBatch",
    "AttentionParams",
    "Backend",
    "CpuBackend",
    "DecoderLayerWeights",
    "LayerCache",
    "LayerStep",
    "Product",
    "WeightPanels",
    "converts_fp8",
    "paged_attention",
    "reshape_and_cache",
    "select_backend",
]
