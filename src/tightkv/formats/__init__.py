"""How numbers become bytes: KV cache formats, their codes, scales and the layout of a block."""

from tightkv.formats.base import CodeType, Granularity, TensorFormat
from tightkv.formats.layout import BlockLayout
from tightkv.formats.quantization import Quantized, dequantize, quantize
from tightkv.formats.registry import KV_CACHE_DTYPES, resolve_format
from tightkv.formats.scales import (
    KVCachePolicy,
    KVCacheScales,
    LayerPolicy,
    LayerScales,
    TensorPolicy,
    TensorScale,
)
from tightkv.formats.scales_file import (
    LayerEntry,
    ModelEntry,
    Provenance,
    ScalesFile,
    TensorEntry,
    read_scales_file,
    write_scales_file,
)

__all__ = [
    "KV_CACHE_DTYPES",
    "BlockLayout",
    "CodeType",
    "Granularity",
    "KVCachePolicy",
    "KVCacheScales",
    "LayerEntry",
    "LayerPolicy",
    "LayerScales",
    "ModelEntry",
    "Provenance",
    "Quantized",
    "ScalesFile",
    "TensorEntry",
    "TensorFormat",
    "TensorPolicy",
    "TensorScale",
    "dequantize",
    "quantize",
    "read_scales_file",
    "resolve_format",
    "write_scales_file",
]
