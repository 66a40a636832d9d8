"""What a Triton kernel is compiled for: numbers that follow from a layout, and the tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightkv.errors import KernelError
from tightkv.formats.base import CodeType, TensorFormat
from tightkv.formats.layout import TILE, BlockLayout

__all__ = [
    "PARTITION",
    "AttentionShape",
    "DeviceTraits",
    "LayerShape",
    "TensorShape",
    "attention_shape",
    "launch_options",
]

PARTITION = 256
"""Tokens whose weighted sum is made on its own, at fixed positions of a sequence.

docs/formats.md: a row must not depend on how a batch is cut, so nothing may change this number
but a new version of the kernels.
"""

_LARGEST_SIZE = 256
_LARGEST_ROWS = 32
"""Of a tile. From 64 on Triton takes another instruction (wgmma, tcgen05) for a product, whose
sums may differ in their last bits from those of the 16 rows of a decode."""

_SMALLEST_ROWS = 16  # what a product on tensor cores takes
_ROWS_OF_WARPS = 4  # rows of a tile per warp of 32 threads
_ALL_REGISTERS = 255
_THREE_PROGRAMS = 168  # registers with which three programs of 4 warps fit a multiprocessor
_TILE_BYTES = 8192  # of K or V: some hundred bytes in flight per thread


@dataclass(frozen=True)
class TensorShape:
    """K or V of a layer. Strides and offsets count units: two one-byte codes, else one code.

    Attributes:
        mantissa: explicit bits of a code's mantissa; 0 for integers. It names the type.
        bias: of a code's exponent.
        max_value: largest magnitude of a code.
        clip_at: from where on a value counts as clipped.
        interleave: codes of a unit that are terms of the same sum.
        pack: codes of a unit that are not: neighbouring tokens of K, channels of V.
        size: channels.
        stored: channels with padding.
        tile: channels with padding up to a power of two: what a kernel works on.
        code_bytes: bytes of a code.
        units: of K: sums of codes of a token that a kernel works on.
        stored_units: of K: those that are stored.
        static: whether there are static factors.
        dynamic: whether there are dynamic scales.
        block: from one block to the next.
        offset: of the codes in a block.
        head: from one KV head to the next.
        scale_block: from one block to the next, in fp16 numbers.
        scale_offset: of the dynamic scales in a block, in fp16 numbers.
    """

    mantissa: int
    bias: int
    max_value: float
    clip_at: float
    interleave: int
    pack: int
    size: int
    stored: int
    tile: int
    code_bytes: int
    units: int
    stored_units: int
    static: bool
    dynamic: bool
    block: int
    offset: int
    head: int
    scale_block: int
    scale_offset: int


@dataclass(frozen=True)
class LayerShape:
    """A layer's K and V."""

    k: TensorShape
    v: TensorShape
    num_kv_heads: int
    block_size: int

    @classmethod
    def of(cls, layout: BlockLayout) -> LayerShape:
        """What the kernels need to know of a layout.

        Raises:
            KernelError: if there is no kernel for it.
        """
        for name, size in (("head_size", layout.head_size), ("value_size", layout.value_size)):
            if not 1 <= size <= _LARGEST_SIZE:
                raise KernelError(
                    f"The Triton kernels cannot serve this layer: {name} is {size}, but must be "
                    f"1 to {_LARGEST_SIZE}, since a tile of it has to fit the registers."
                )
        return cls(
            _tensor_shape(
                layout,
                layout.k_format,
                layout.head_size,
                layout.padded_head_size,
                layout.k_offset,
                layout.k_scale_offset,
            ),
            _tensor_shape(
                layout,
                layout.v_format,
                layout.value_size,
                layout.padded_value_size,
                layout.v_offset,
                layout.v_scale_offset,
            ),
            layout.num_kv_heads,
            layout.block_size,
        )


@dataclass(frozen=True)
class DeviceTraits:
    """What of a device the kernels depend on.

    Attributes:
        native_fp8: whether it converts E4M3 itself.
        interpreted: whether Triton's interpreter runs the kernels; it has no bfloat16 products.
        ptx: whether it takes NVIDIA's instructions by name.
        int8_products: whether it multiplies int8 on tensor cores.
        f32_precision: how products of float32 are made, in Triton's words.
        num_units: multiprocessors, or what comes nearest.
    """

    native_fp8: bool = False
    interpreted: bool = False
    ptx: bool = False
    int8_products: bool = False
    f32_precision: str = "ieee"
    num_units: int = 1


@dataclass(frozen=True)
class AttentionShape:
    """What an attention kernel is compiled for.

    Attributes:
        layer: the cache.
        group: query heads of a KV head.
        head_rows: query heads in a tile, a power of two.
        head_tiles: tiles that a group takes.
        queries: query tokens in a tile.
        rows: rows of a tile, which are query heads times query tokens.
        tokens: keys of a tile.
        q_terms: narrow numbers whose sum is a query value.
        p_terms: narrow numbers whose sum is a weight.
        k_unit: what the codes of K, as they are read, must be multiplied with.
        v_unit: what the codes of V, as they are read, must be multiplied with.
        window: whether there is a sliding window.
        softcap: whether there is a softcap.
        sinks: whether there are sinks.
        quantized_query: whether query rows are rounded to int8, for whole products with K.
        max_registers: of a thread, where that can be said.
        native_fp8: as of the device; so are those below.
    """

    layer: LayerShape
    group: int
    head_rows: int
    head_tiles: int
    queries: int
    rows: int
    tokens: int
    q_terms: int
    p_terms: int
    k_unit: float
    v_unit: float
    window: bool
    softcap: bool
    sinks: bool
    quantized_query: bool
    max_registers: int
    native_fp8: bool
    interpreted: bool
    ptx: bool
    f32_precision: str


def attention_shape(
    layer: LayerShape,
    group: int,
    query_dtype: torch.dtype,
    device: DeviceTraits,
    *,
    decode: bool,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    quantized_query: bool = False,
) -> AttentionShape:
    """Tiles and terms for a layer, a number of query heads per KV head, and a device."""
    wide = max(layer.k.tile, layer.v.tile) > 128 or layer.k.mantissa == 23 or layer.v.mantissa == 23
    largest_rows = _SMALLEST_ROWS if wide else _LARGEST_ROWS  # so that no registers are spilled
    head_rows = min(_power_of_two(group), largest_rows)
    rows = max(head_rows, _SMALLEST_ROWS if decode else largest_rows)
    three_fit = decode and rows == _SMALLEST_ROWS and not wide and query_dtype != torch.float32
    per_token = max(layer.k.tile * layer.k.code_bytes, layer.v.tile * layer.v.code_bytes)
    return AttentionShape(
        layer=layer,
        group=group,
        head_rows=head_rows,
        head_tiles=-(-group // head_rows),
        queries=rows // head_rows,
        rows=rows,
        tokens=min(128, max(32, _TILE_BYTES // per_token)),
        q_terms=1 if quantized_query else _query_terms(layer.k, query_dtype),
        p_terms={23: 1, 7: 3}.get(layer.v.mantissa, 2),
        k_unit=_unit(layer.k, device),
        v_unit=_unit(layer.v, device),
        window=window,
        softcap=softcap,
        sinks=sinks,
        quantized_query=quantized_query,
        max_registers=_THREE_PROGRAMS if three_fit else _ALL_REGISTERS,
        native_fp8=device.native_fp8,
        interpreted=device.interpreted,
        ptx=device.ptx,
        f32_precision=device.f32_precision,
    )


def launch_options(shape: AttentionShape) -> dict[str, int | bool]:
    """How `prefill_kernel` and `decode_kernel` are compiled for a shape."""
    options: dict[str, int | bool] = {
        "num_warps": shape.rows // _ROWS_OF_WARPS,
        "num_stages": 2,
        "enable_fp_fusion": False,  # so that the compiler has no say in what is rounded
    }
    if shape.ptx:  # of itself ptxas spills some at 96 or 128
        options["maxnreg"] = shape.max_registers
    return options


def _mantissa_bits(code: CodeType) -> int:
    """Explicit bits of the mantissa; 0 for integers."""
    if not code.dtype.is_floating_point:
        return 0
    return round(-torch.tensor(torch.finfo(code.dtype).eps).log2().item())


def _query_terms(k: TensorShape, query_dtype: torch.dtype) -> int:
    """How many narrow numbers a query row needs so that nothing is lost beside float32."""
    if k.mantissa == 23:
        return 1
    wide = k.static or query_dtype == torch.float32
    if k.mantissa == 7:  # products of bfloat16: 8 bits a term
        return 3 if wide else 1 if query_dtype == torch.bfloat16 else 2
    return 2 if wide else 1


def _tensor_shape(
    layout: BlockLayout,
    tensor_format: TensorFormat,
    size: int,
    stored: int,
    offset: int,
    scale_offset: int,
) -> TensorShape:
    code = tensor_format.code
    mantissa = _mantissa_bits(code)
    exponent_bits = 8 * code.num_bytes - 1 - mantissa
    pack = 2 if code.num_bytes * code.interleave == 1 else 1
    unit_bytes = code.num_bytes * code.interleave * pack
    tile = max(TILE * code.interleave, _power_of_two(size))  # a product takes 16 numbers or more
    return TensorShape(
        mantissa=mantissa,
        bias=2 ** (exponent_bits - 1) - 1,
        max_value=code.max_value,
        clip_at=code.clip_at,
        interleave=code.interleave,
        pack=pack,
        size=size,
        stored=stored,
        tile=tile,
        code_bytes=code.num_bytes,
        units=tile // code.interleave,
        stored_units=stored // code.interleave,
        static=tensor_format.static is not None,
        dynamic=tensor_format.dynamic,
        block=layout.stride // unit_bytes,
        offset=offset // unit_bytes,
        head=layout.block_size * stored // (code.interleave * pack),
        scale_block=layout.stride // 2,
        scale_offset=scale_offset // 2,
    )


def _unit(tensor: TensorShape, device: DeviceTraits) -> float:
    # E4M3 read as the upper half of an fp16 number: the exponents' biases differ by 8.
    return 256.0 if tensor.mantissa == 3 and not device.native_fp8 else 1.0


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
