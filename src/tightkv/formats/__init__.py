"""How numbers become bytes: KV cache formats, their codes, scales and the layout of a block."""

from tightkv.formats.base import CodeType, Granularity, TensorFormat
from tightkv.formats.layout import BlockLayout
from tightkv.formats.quantization import Quantized, dequantize, quantize
from tightkv.formats.registry import KV_CACHE_DTYPES, resolve_format
from tightkv.formats.scales import KVCacheScales, LayerScales, TensorScale

__all__ = [
    "KV_CACHE_DTYPES",
    "BlockLayout",
    "CodeType",
    "Granularity",
    "KVCacheScales",
    "LayerScales",
    "Quantized",
    "TensorFormat",
    "TensorScale",
    "dequantize",
    "quantize",
    "resolve_format",
]
