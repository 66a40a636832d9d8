"""A step's numbers on their way to a device and back, each in one copy through pinned memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy
import torch

from tightkv.engine.batch import Array, BatchArrays
from tightkv.errors import EngineError

__all__ = ["DevicePlacement", "ResultsBuffer", "StagingBuffer", "bucket_sizes", "step_bytes"]

_ALIGNMENT = 16  # Triton compiles a kernel anew for pointers that are no multiple of it

Pin = Callable[[int], torch.Tensor]
"""Makes so many bytes of pinned memory, uint8."""


class _Mirror:
    """The same bytes in pinned memory of the host and on the device; `resize` loses them."""

    def __init__(self, device: torch.device, pin: Pin, num_bytes: int) -> None:
        self._device, self._pin = device, pin
        self.resize(num_bytes)

    def __len__(self) -> int:
        return len(self.on_host)

    def resize(self, num_bytes: int) -> None:
        self.on_host = self._pin(num_bytes)
        self.array = self.on_host.numpy()
        self.on_device = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class StagingBuffer:
    """Arrays side by side in pinned memory, and their copy on the device: both stay."""

    def __init__(
        self, device: torch.device, pin: Pin, num_bytes: int, *, grows: bool = False
    ) -> None:
        """Allocate.

        Args:
            device: where the copy lies.
            pin: makes pinned memory.
            num_bytes: of all arrays, as `step_bytes` has it.
            grows: whether it is made anew for arrays that do not fit; then no tensor cut out of it
                keeps its address.
        """
        self._mirror = _Mirror(device, pin, num_bytes)
        self._grows = grows

    def place(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Copy all arrays at once, without waiting; equal shapes get equal addresses.

        What was placed before is lost, and must have been used up by the host's last wait.

        Raises:
            EngineError: if they do not fit.
        """
        mirror = self._mirror
        *begins, total = itertools.accumulate(map(_aligned_bytes, arrays), initial=0)
        if total > len(mirror):
            if not self._grows:
                raise EngineError(
                    f"A step has {total} bytes of integers, but {len(mirror)} were planned."
                )
            mirror.resize(2 * total)
        for array, begin in zip(arrays, begins, strict=True):
            piece = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
            mirror.array[begin : begin + array.nbytes] = piece
        mirror.on_device[:total].copy_(mirror.on_host[:total], non_blocking=True)
        return [self._cut(array, begin) for array, begin in zip(arrays, begins, strict=True)]

    def _cut(self, array: Array, begin: int) -> torch.Tensor:
        dtype = torch.from_numpy(numpy.empty(0, array.dtype)).dtype
        piece = self._mirror.on_device[begin : begin + array.nbytes]
        return piece.view(dtype).view(array.shape)


class ResultsBuffer:
    """Takes tensors of a device to the host in one copy: the only place where a step waits."""

    def __init__(self, device: torch.device, pin: Pin, num_bytes: int = 2**16) -> None:
        self._mirror = _Mirror(device, pin, num_bytes)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        """All tensors as arrays, which hold until the next call; waits until they are computed."""
        mirror = self._mirror
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        total = sum(len(part) for part in parts)
        if total > len(mirror):
            mirror.resize(2 * total)
        torch.cat(parts, out=mirror.on_device[:total])
        mirror.on_host[:total].copy_(mirror.on_device[:total])
        arrays, begin = [], 0
        for tensor, part in zip(tensors, parts, strict=True):
            piece = mirror.array[begin : begin + len(part)]
            dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
            arrays.append(numpy.frombuffer(piece, dtype).reshape(tuple(tensor.shape)))
            begin += len(part)
        return arrays


class DevicePlacement:
    """Brings steps to a device, decodes padded to the sizes of which captured steps exist.

    Attributes:
        buckets: these sizes, ascending; none: steps run as they are.
        table_width: blocks of the longest sequence, which is the width of padded block tables.
    """

    def __init__(
        self, staging: StagingBuffer, device: torch.device, max_tokens: int, table_width: int
    ) -> None:
        """Bind the memory that steps share.

        Args:
            staging: for the arrays.
            device: where the steps run.
            max_tokens: of a step.
            table_width: as the attribute.
        """
        self.buckets: tuple[int, ...] = ()
        self._staging = staging
        self._bad_tokens = torch.zeros(max_tokens, dtype=torch.bool, device=device)
        self.table_width = table_width

    def fit(self, arrays: BatchArrays) -> BatchArrays:
        """A step of decodes becomes as large as the next bucket.

        Rows of padding have no key and are written to no slot.
        """
        count = len(arrays.input_ids)
        bucket = next((size for size in self.buckets if size >= count), 0)
        return self.pad(arrays, bucket) if bucket and arrays.is_decode else arrays

    def pad(self, arrays: BatchArrays, bucket: int) -> BatchArrays:
        """A step of decodes with `bucket` rows, its block tables as wide as they can become."""
        rows = bucket - len(arrays.input_ids)
        return replace(
            arrays,
            input_ids=numpy.pad(arrays.input_ids, (0, rows)),
            positions=numpy.pad(arrays.positions, (0, rows)),
            slot_mappings=tuple(
                numpy.pad(slots, (0, rows), constant_values=-1) for slots in arrays.slot_mappings
            ),
            seq_lens=numpy.pad(arrays.seq_lens, (0, rows)),
            query_start_loc=numpy.arange(bucket + 1, dtype=numpy.int32),
            block_tables=tuple(
                numpy.pad(table, ((0, rows), (0, self.table_width - table.shape[1])))
                for table in arrays.block_tables
            ),
            bucket=bucket,
        )

    def place(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        return self._staging.place(arrays)

    def no_bad_tokens(self, num_tokens: int) -> torch.Tensor:
        return self._bad_tokens[:num_tokens].zero_()


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, … and `max_num_seqs`."""
    powers = [2**power for power in range(max_num_seqs.bit_length())]
    return tuple(sorted({*powers, max_num_seqs}))


def step_bytes(max_tokens: int, max_num_seqs: int, table_width: int, num_groups: int) -> int:
    """Bytes that a step's arrays need in a `StagingBuffer` at most.

    Args:
        max_tokens: of a step.
        max_num_seqs: of a step.
        table_width: blocks of the longest sequence.
        num_groups: layer groups.
    """
    of_token = 8 * (3 + num_groups)  # id, position, row, slots
    of_sequence = 4 * (3 + num_groups * table_width)  # length, two starts, tables
    # The sampler's: 7 numbers of each row that is sampled, 3 of each that is scored.
    of_row = 8 * (7 + 3)
    num_arrays = 16 + 2 * num_groups
    rows = max_tokens * (of_token + 8 * 3) + (max_num_seqs + 1) * (of_sequence + of_row)
    return _aligned(rows + num_arrays * _ALIGNMENT)


def _aligned_bytes(array: Array) -> int:
    return _aligned(array.nbytes)


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT
