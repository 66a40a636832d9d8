"""From scheduled chunks to the tensors of one forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy
import torch

from tightkv.engine.scheduler import ScheduledChunk
from tightkv.kernels import AttentionBatch
from tightkv.kvcache import AttentionMetadata, KVCacheManager

__all__ = ["ForwardBatch", "build_forward_batch"]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """A step, packed: the chunks' tokens one after the other, no padding.

    Attributes:
        input_ids: int64 `[num_tokens]`.
        positions: int64 `[num_tokens]`.
        logit_rows: int64 `[num_rows]`, tokens whose logits are needed.
        rows_per_chunk: how many of these belong to each chunk.
    """

    chunks: tuple[ScheduledChunk, ...]
    input_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    rows_per_chunk: tuple[int, ...]
    metadata: AttentionMetadata


def build_forward_batch(
    chunks: Seq[ScheduledChunk], manager: KVCacheManager, device: torch.device
) -> ForwardBatch:
    """Lay out the chunks of a step."""
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
    logit_rows = torch.tensor(rows, dtype=torch.int64, device=device)
    return ForwardBatch(
        chunks=tuple(chunks),
        input_ids=torch.tensor(input_ids, device=device),
        positions=torch.tensor(positions, device=device),
        logit_rows=logit_rows,
        rows_per_chunk=tuple(rows_per_chunk),
        metadata=_metadata(chunks, manager, device, logit_rows, rows_per_chunk),
    )


def _logit_rows(chunk: ScheduledChunk, first: int, end: int) -> range:
    if chunk.sequence.needs_prompt_logprobs:
        return range(first, end)
    return range(end - 1, end) if chunk.completes else range(0)


def _metadata(
    chunks: Seq[ScheduledChunk],
    manager: KVCacheManager,
    device: torch.device,
    logit_rows: torch.Tensor,
    rows_per_chunk: Seq[int],
) -> AttentionMetadata:
    lengths = [chunk.num_tokens for chunk in chunks]
    ends = [chunk.sequence.num_computed_tokens + chunk.num_tokens for chunk in chunks]
    per_sequence = [manager.block_tables(chunk.sequence.seq_id) for chunk in chunks]
    tables = [list(group) for group in zip(*per_sequence, strict=True)]
    block_tables = [_block_table(group, device) for group in tables]
    seq_lens = torch.tensor(ends, dtype=torch.int32, device=device)

    def batches(num_queries: Seq[int]) -> tuple[AttentionBatch, ...]:
        starts = torch.tensor(
            [0, *itertools.accumulate(num_queries)], dtype=torch.int32, device=device
        )
        return tuple(AttentionBatch(starts, seq_lens, table) for table in block_tables)

    # The rows of a chunk are its last tokens.
    is_all = len(logit_rows) == sum(lengths)
    return AttentionMetadata(
        batches=batches(lengths),
        slot_mappings=tuple(
            _slot_mapping(group, chunks, manager.block_size, device) for group in tables
        ),
        bad_tokens=torch.zeros(sum(lengths), dtype=torch.bool, device=device),
        rows=None if is_all else logit_rows,
        row_batches=() if is_all else batches(rows_per_chunk),
    )


def _block_table(tables: Seq[Seq[int]], device: torch.device) -> torch.Tensor:
    padded = numpy.zeros((len(tables), max(map(len, tables))), dtype=numpy.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return torch.from_numpy(padded).to(device)


def _slot_mapping(
    tables: Seq[Seq[int]], chunks: Seq[ScheduledChunk], block_size: int, device: torch.device
) -> torch.Tensor:
    # A step of decodes has few slots: tensors for each of its chunks would take longer.
    slots: list[int] = []
    for table, chunk in zip(tables, chunks, strict=True):
        begin = chunk.sequence.num_computed_tokens
        slots += (
            table[position // block_size] * block_size + position % block_size
            for position in range(begin, begin + chunk.num_tokens)
        )
    return torch.tensor(slots, dtype=torch.int64, device=device)
