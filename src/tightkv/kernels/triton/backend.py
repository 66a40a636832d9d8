"""The Triton kernels behind the `Backend` interface. No call waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from tightkv.errors import KernelError
from tightkv.formats.layout import BlockLayout
from tightkv.kernels.arguments import AttentionBatch, AttentionParams, LayerCache
from tightkv.kernels.capability import converts_fp8
from tightkv.kernels.triton import write
from tightkv.kernels.triton.attention import (
    REDUCE_OPTIONS,
    decode_kernel,
    prefill_kernel,
    reduce_kernel,
)
from tightkv.kernels.triton.shapes import (
    PARTITION,
    AttentionShape,
    DeviceTraits,
    LayerShape,
    TensorShape,
    attention_shape,
    launch_options,
)

__all__ = ["TritonBackend"]

_BOUND = "triton"  # under which name arguments keep what is made of them
_SCRATCH_BYTES = 256 * 2**20  # of partial sums; a batch that needs more is taken in pieces
_PROGRAMS_PER_UNIT = 16  # of a decode, so that its last ones end at about the same time
_QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _BoundCache:
    """A layer's blocks as the types that the kernels read."""

    shape: LayerShape
    k_units: torch.Tensor
    v_units: torch.Tensor
    k_codes: torch.Tensor
    v_codes: torch.Tensor
    scales: torch.Tensor


class TritonBackend:
    """Triton's kernels on one device.

    Attributes:
        reason: why this one was chosen.
    """

    def __init__(
        self,
        device: torch.device,
        reason: str = "asked for",
        *,
        quantize_query: bool = False,
    ) -> None:
        """Make the kernels ready; each is compiled at its first use.

        Args:
            device: where tensors lie.
            reason: why this backend was chosen.
            quantize_query: round each query row to int8, by its largest value, and multiply it
                with int8 codes of K in whole numbers: less work, beyond the formats' tolerance.

        Raises:
            KernelError: if Triton has no compiler for the device, or the device no such products.
        """
        self.device = device
        self.reason = reason
        self._traits, self._described = _traits_of(device)
        self._quantize_query = quantize_query
        if quantize_query and not self._traits.int8_products:
            raise KernelError(
                f"quantize_query needs int8 products on tensor cores, which {self._described} is "
                "not known to have: use an NVIDIA GPU of compute capability 8.0 or more, or leave "
                "it out."
            )

    @property
    def name(self) -> str:
        rounded = ", queries rounded to int8" if self._quantize_query else ""
        return f"Triton {triton.__version__} ({self._described}{rounded})"

    def check_layout(self, layout: BlockLayout) -> None:
        self._check_rounding(LayerShape.of(layout))

    def _check_rounding(self, layer: LayerShape) -> None:
        if self._quantize_query and layer.k.mantissa != 0:
            raise KernelError(
                "quantize_query multiplies queries with int8 codes of K, but this layer's K has "
                "float codes: choose int8 for K in every layer, or leave it out."
            )

    def reshape_and_cache(
        self,
        cache: LayerCache,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        clip_counts: torch.Tensor,
        bad_tokens: torch.Tensor,
    ) -> None:
        """See `tightkv.kernels.ops`; a slot outside the cache is not written, without an error."""
        num_tokens = len(slot_mapping)
        if num_tokens == 0:
            return
        bound = _bind(cache)
        _check_rows("key", key)
        _check_rows("value", value)
        shape = bound.shape
        write.write_kernel[(triton.cdiv(num_tokens, write.TOKENS), shape.num_kv_heads)](
            key,
            value,
            slot_mapping,
            _or_any(cache.k_scale, key),
            _or_any(cache.v_scale, key),
            bound.k_codes,
            bound.v_codes,
            bound.scales.view(torch.int16),
            clip_counts,
            bad_tokens.view(torch.uint8),
            num_tokens,
            len(cache.blocks) * shape.block_size,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            L=shape,
            TOKENS=write.TOKENS,
            **write.LAUNCH_OPTIONS,
        )

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> torch.Tensor:
        _check_rows("query", query)
        num_tokens, num_heads, _ = query.shape
        bound = _bind(cache)
        self._check_rounding(bound.shape)
        out = torch.empty(
            num_tokens, num_heads, cache.layout.value_size, dtype=torch.float32, device=query.device
        )
        call = _Call(query, out, cache, bound, batch, params, self._traits, self._quantize_query)
        num_partitions = triton.cdiv(
            batch.block_table.shape[1] * cache.layout.block_size, PARTITION
        )
        splits = num_partitions > 1
        if splits:
            call.decode(num_partitions)
        if not splits or batch.max_query_len != 1:
            call.prefill(min_queries=2 if splits else 1)
        return out


class _Call:
    """One call of `paged_attention`: its arguments, and the launches."""

    def __init__(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        cache: LayerCache,
        bound: _BoundCache,
        batch: AttentionBatch,
        params: AttentionParams,
        traits: DeviceTraits,
        quantize_query: bool,
    ) -> None:
        self.query, self.out, self.cache, self.bound = query, out, cache, bound
        self.batch, self.params, self.traits = batch, params, traits
        self.quantize_query = quantize_query
        self.num_tokens, self.num_heads, _ = query.shape
        self.k_static = _or_any(cache.k_scale, out)
        self.v_static = _or_any(cache.v_scale, out)
        self.sinks = _or_any(params.sinks, out)

    def shape(self, decode: bool) -> AttentionShape:
        return _attention_shape(
            self.bound.shape,
            self.num_heads // self.bound.shape.num_kv_heads,
            self.query.dtype,
            self.traits,
            decode,
            self.params.sliding_window is not None,
            self.params.softcap is not None,
            self.params.sinks is not None,
            self.quantize_query,
        )

    def prefill(self, min_queries: int) -> None:
        shape, batch, params = self.shape(decode=False), self.batch, self.params
        num_seqs = len(batch.seq_lens)
        tiles = self.num_tokens // shape.queries + num_seqs
        prefill_kernel[(tiles, self.bound.shape.num_kv_heads * shape.head_tiles)](
            self.query,
            self.out,
            self.bound.k_units,
            self.bound.v_units,
            self.bound.scales,
            self.k_static,
            self.v_static,
            self.sinks,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            batch.block_table.shape[1],
            num_seqs,
            min_queries,
            self.query.stride(0),
            self.query.stride(1),
            self.num_heads,
            params.softmax_scale,
            params.sliding_window or 0,
            params.softcap or 1.0,
            S=shape,
            PARTITION=PARTITION,
            **launch_options(shape),
        )

    def decode(self, num_partitions: int) -> None:
        """Sequences with one query, in pieces whose partial sums fit the scratch memory."""
        shape = self.shape(decode=True)
        rows_of_seq = self.num_heads * num_partitions
        channels = self.bound.shape.v.tile
        num_seqs = len(self.batch.seq_lens)
        piece = min(num_seqs, max(1, _SCRATCH_BYTES // (rows_of_seq * (channels + 2) * 4)))
        part_sums = self.out.new_empty(piece * rows_of_seq, channels)
        part_weights = self.out.new_empty(piece * rows_of_seq, 2)
        for first_seq in range(0, num_seqs, piece):
            count = min(piece, num_seqs - first_seq)
            self._decode_piece(shape, first_seq, count, num_partitions, part_sums, part_weights)

    def _decode_piece(
        self,
        shape: AttentionShape,
        first_seq: int,
        count: int,
        num_partitions: int,
        part_sums: torch.Tensor,
        part_weights: torch.Tensor,
    ) -> None:
        batch, params = self.batch, self.params
        tiles = self.bound.shape.num_kv_heads * shape.head_tiles
        wanted = triton.cdiv(self.traits.num_units * _PROGRAMS_PER_UNIT, count * tiles)
        decode_kernel[(count, tiles, min(num_partitions, wanted))](
            self.query,
            part_sums,
            part_weights,
            self.bound.k_units,
            self.bound.v_units,
            self.bound.scales,
            self.k_static,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            batch.block_table.shape[1],
            first_seq,
            num_partitions,
            self.query.stride(0),
            self.query.stride(1),
            self.num_heads,
            params.softmax_scale,
            params.sliding_window or 0,
            params.softcap or 1.0,
            S=shape,
            PARTITION=PARTITION,
            **launch_options(shape),
        )
        reduce_kernel[(count, self.num_heads)](
            part_sums,
            part_weights,
            self.out,
            self.v_static,
            self.sinks,
            batch.query_start_loc,
            batch.seq_lens,
            first_seq,
            num_partitions,
            self.num_heads,
            params.sliding_window or 0,
            S=shape,
            PARTITION=PARTITION,
            **REDUCE_OPTIONS,
        )


@lru_cache(maxsize=1024)
def _attention_shape(
    layer: LayerShape,
    group: int,
    query_dtype: torch.dtype,
    traits: DeviceTraits,
    decode: bool,
    window: bool,
    softcap: bool,
    sinks: bool,
    quantized_query: bool,
) -> AttentionShape:
    return attention_shape(
        layer,
        group,
        query_dtype,
        traits,
        decode=decode,
        window=window,
        softcap=softcap,
        sinks=sinks,
        quantized_query=quantized_query,
    )


def _traits_of(device: torch.device) -> tuple[DeviceTraits, str]:
    """What the kernels depend on, and the device in words."""
    if triton.knobs.runtime.interpret:
        return DeviceTraits(interpreted=True, int8_products=True), "its interpreter, slow"
    if device.type != "cuda":  # torch's name for AMD's devices, too
        raise KernelError(
            f"The Triton kernels cannot run on the device {device}: use cuda, or set "
            "TRITON_INTERPRET=1 to try them on cpu."
        )
    properties = torch.cuda.get_device_properties(device)
    is_nvidia = torch.version.hip is None
    traits = DeviceTraits(
        native_fp8=is_nvidia and converts_fp8((properties.major, properties.minor)),
        ptx=is_nvidia,
        int8_products=is_nvidia and properties.major >= 8,
        f32_precision="tf32x3" if is_nvidia else "ieee",
        num_units=properties.multi_processor_count,
    )
    return traits, properties.name


def _bind(cache: LayerCache) -> _BoundCache:
    if _BOUND not in cache.bound:
        shape = LayerShape.of(cache.layout)
        cache.bound[_BOUND] = _BoundCache(
            shape,
            cache.blocks.view(_unit_dtype(shape.k)),
            cache.blocks.view(_unit_dtype(shape.v)),
            cache.blocks.view(_code_dtype(shape.k)),
            cache.blocks.view(_code_dtype(shape.v)),
            cache.blocks.view(torch.float16),
        )
    bound: _BoundCache = cache.bound[_BOUND]
    return bound


def _unit_dtype(tensor: TensorShape) -> torch.dtype:
    """As what codes are read: see `codes.decode` and `codes.decode_pair`."""
    return {
        0: torch.int16,
        2: torch.int16,
        3: torch.int16,
        7: torch.int16,
        10: torch.float16,
        23: torch.float32,
    }[tensor.mantissa]


def _code_dtype(tensor: TensorShape) -> torch.dtype:
    """As what codes are written: what `codes.encode` returns."""
    if tensor.mantissa == 0:
        return torch.int8
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.code_bytes]


def _check_rows(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _QUERY_DTYPES:
        raise KernelError(
            f"{name} is a tensor of {tensor.dtype}, but the Triton kernels take float32, float16 "
            "and bfloat16: convert it."
        )
    if tensor.stride(-1) != 1:
        raise KernelError(f"Channels must be contiguous, but their stride is {tensor.stride(-1)}.")


def _or_any(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """An absent tensor's place is taken by one that the kernel does not read."""
    return other if tensor is None else tensor
