"""From scheduled chunks to the tensors of one forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from numpy.typing import NDArray

from tightkv.engine.scheduler import ScheduledChunk
from tightkv.kernels import AttentionBatch
from tightkv.kvcache import AttentionMetadata, KVCacheManager

__all__ = [
    "HOST",
    "Array",
    "BatchArrays",
    "ForwardBatch",
    "HostPlacement",
    "Placement",
    "build_forward_batch",
    "place_batch",
]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class BatchArrays:
    """A step's integers, on the host.

    Attributes:
        input_ids: int64 `[num_tokens]`.
        positions: int64 `[num_tokens]`.
        slot_mappings: per layer group, int64 `[num_tokens]`.
        seq_lens: int32 `[num_seqs]`.
        query_start_loc: int32 `[num_seqs + 1]`.
        block_tables: per layer group, int32 `[num_seqs, max_blocks]`.
        logit_rows: int64 `[num_rows]`, tokens whose logits are needed.
        row_start_loc: as `query_start_loc`, of these tokens alone.
        max_query_len: the longest query.
        bucket: rows of the captured step that these fill; 0: none.
    """

    input_ids: Array
    positions: Array
    slot_mappings: tuple[Array, ...]
    seq_lens: Array
    query_start_loc: Array
    block_tables: tuple[Array, ...]
    logit_rows: Array
    row_start_loc: Array
    max_query_len: int
    bucket: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one token, and a row of logits."""
        return len(self.input_ids) == len(self.seq_lens) == len(self.logit_rows)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """A step, packed: the chunks' tokens one after the other, no padding.

    Attributes:
        input_ids: int64 `[num_tokens]`.
        positions: int64 `[num_tokens]`.
        logit_rows: int64 `[num_rows]`, tokens whose logits are needed.
        rows_per_chunk: how many of these belong to each chunk.
        bucket: rows of the captured step that runs it, of which the last ones are padding; 0: it
            runs as it is.
        sampling: what was sent along with it for the sampler.
    """

    chunks: tuple[ScheduledChunk, ...]
    input_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    rows_per_chunk: tuple[int, ...]
    metadata: AttentionMetadata
    bucket: int = 0
    sampling: tuple[torch.Tensor, ...] = ()


class Placement(Protocol):
    """Brings a step's arrays to where the model runs."""

    def fit(self, arrays: BatchArrays) -> BatchArrays:
        """The step as it is to run, perhaps padded."""

    def place(self, arrays: Seq[Array]) -> list[torch.Tensor]:
        """The same as tensors; they hold until the next call."""

    def no_bad_tokens(self, num_tokens: int) -> torch.Tensor:
        """False `[num_tokens]`; it holds until the next call."""


class HostPlacement:
    """On the CPU the arrays are the tensors."""

    def fit(self, arrays: BatchArrays) -> BatchArrays:
        return arrays

    def place(self, arrays: Seq[Array]) -> list[torch.Tensor]:
        return list(map(torch.from_numpy, arrays))

    def no_bad_tokens(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, dtype=torch.bool)


HOST = HostPlacement()


def build_forward_batch(
    chunks: Seq[ScheduledChunk],
    manager: KVCacheManager,
    placement: Placement,
    sampling: Seq[Array] = (),
) -> ForwardBatch:
    """Lay out the chunks of a step; `sampling` is sent along for the sampler."""
    arrays, rows_per_chunk = _lay_out(chunks, manager)
    return place_batch(placement.fit(arrays), placement, tuple(chunks), rows_per_chunk, sampling)


def place_batch(
    arrays: BatchArrays,
    placement: Placement,
    chunks: tuple[ScheduledChunk, ...] = (),
    rows_per_chunk: tuple[int, ...] = (),
    sampling: Seq[Array] = (),
) -> ForwardBatch:
    """Send all arrays of a step at once, and give each tensor its place."""
    groups = len(arrays.block_tables)
    # What a captured step reads comes first: its place depends on the bucket alone.
    tensors = iter(
        placement.place(
            [
                arrays.input_ids,
                arrays.positions,
                arrays.seq_lens,
                arrays.query_start_loc,
                *arrays.slot_mappings,
                *arrays.block_tables,
                arrays.logit_rows,
                arrays.row_start_loc,
                *sampling,
            ]
        )
    )
    input_ids, positions, seq_lens, query_start_loc = itertools.islice(tensors, 4)
    slot_mappings = tuple(itertools.islice(tensors, groups))
    block_tables = tuple(itertools.islice(tensors, groups))
    logit_rows, row_start_loc = itertools.islice(tensors, 2)

    def batches(starts: torch.Tensor, max_query_len: int | None) -> tuple[AttentionBatch, ...]:
        return tuple(
            AttentionBatch(starts, seq_lens, table, max_query_len) for table in block_tables
        )

    # The rows of a chunk are its last tokens.
    is_all = arrays.bucket > 0 or len(logit_rows) == len(input_ids)
    return ForwardBatch(
        chunks=chunks,
        input_ids=input_ids,
        positions=positions,
        logit_rows=logit_rows,
        rows_per_chunk=rows_per_chunk,
        metadata=AttentionMetadata(
            batches=batches(query_start_loc, arrays.max_query_len),
            slot_mappings=slot_mappings,
            bad_tokens=placement.no_bad_tokens(len(input_ids)),
            rows=None if is_all else logit_rows,
            row_batches=() if is_all else batches(row_start_loc, None),
        ),
        bucket=arrays.bucket,
        sampling=tuple(tensors),
    )


def _lay_out(
    chunks: Seq[ScheduledChunk], manager: KVCacheManager
) -> tuple[BatchArrays, tuple[int, ...]]:
    input_ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    rows_per_chunk: list[int] = []
    for chunk in chunks:
        begin = chunk.sequence.num_computed_tokens
        end = begin + chunk.num_tokens
        first_row = len(input_ids)
        input_ids += chunk.sequence.token_ids[begin:end]
        positions += range(begin, end)
        chunk_rows = _logit_rows(chunk, first_row, len(input_ids))
        rows += chunk_rows
        rows_per_chunk.append(len(chunk_rows))
    lengths = [chunk.num_tokens for chunk in chunks]
    ends = [chunk.sequence.num_computed_tokens + chunk.num_tokens for chunk in chunks]
    per_sequence = [manager.block_tables(chunk.sequence.seq_id) for chunk in chunks]
    tables = [list(group) for group in zip(*per_sequence, strict=True)]
    arrays = BatchArrays(
        input_ids=numpy.array(input_ids, dtype=numpy.int64),
        positions=numpy.array(positions, dtype=numpy.int64),
        slot_mappings=tuple(_slot_mapping(group, chunks, manager.block_size) for group in tables),
        seq_lens=numpy.array(ends, dtype=numpy.int32),
        query_start_loc=_starts(lengths),
        block_tables=tuple(map(_block_table, tables)),
        logit_rows=numpy.array(rows, dtype=numpy.int64),
        row_start_loc=_starts(rows_per_chunk),
        max_query_len=max(lengths),
    )
    return arrays, tuple(rows_per_chunk)


def _logit_rows(chunk: ScheduledChunk, first: int, end: int) -> range:
    if chunk.sequence.needs_prompt_logprobs:
        return range(first, end)
    return range(end - 1, end) if chunk.completes else range(0)


def _starts(lengths: Seq[int]) -> Array:
    return numpy.array([0, *itertools.accumulate(lengths)], dtype=numpy.int32)


def _block_table(tables: Seq[Seq[int]]) -> Array:
    padded = numpy.zeros((len(tables), max(map(len, tables))), dtype=numpy.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _slot_mapping(tables: Seq[Seq[int]], chunks: Seq[ScheduledChunk], block_size: int) -> Array:
    # A step of decodes has few slots: arrays for each of its chunks would take longer.
    slots: list[int] = []
    for table, chunk in zip(tables, chunks, strict=True):
        begin = chunk.sequence.num_computed_tokens
        slots += (
            table[position // block_size] * block_size + position % block_size
            for position in range(begin, begin + chunk.num_tokens)
        )
    return numpy.array(slots, dtype=numpy.int64)
