"""An engine without a model, with a memory of what each slot should hold."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from benchmarks.modelless import ModellessEngine

from tightkv.config import SchedulerConfig
from tightkv.engine.scheduler import ScheduledChunk
from tightkv.engine.sequence import Sequence
from tightkv.errors import SwapError
from tightkv.kvcache import SwappingKVCacheManager
from tightkv.kvcache.swap_memory import SwapFile

BLOCK_SIZE = 4
MAX_TOKENS = 64
"""Of a sequence."""


class FlakyFile(SwapFile):
    """A swap file whose disk can be made to fail."""

    fails = False

    def write(self, first: int, rows: torch.Tensor) -> None:
        if self.fails:
            raise SwapError("the disk fails")
        super().write(first, rows)

    def read(self, first: int, rows: torch.Tensor) -> None:
        if self.fails:
            raise SwapError("the disk fails")
        super().read(first, rows)


class Modelless(ModellessEngine):
    """Every token depends on all before it, so that a wrong slot is noticed.

    Attributes:
        disk: of the swap space; None without one.
        started: names of sequences, in the order of their first start.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        windows: tuple[int | None, ...] = (None,),
        prefix_caching: bool = True,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        enable_chunked_prefill: bool = True,
        num_reserved_tokens: int = 0,
        num_slots: int = 0,
    ) -> None:
        self.disk: FlakyFile | None = None
        super().__init__(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_chunked_prefill=enable_chunked_prefill,
            ),
            num_blocks,
            windows=windows,
            block_size=BLOCK_SIZE,
            prefix_caching=prefix_caching,
            max_chunk=None if enable_chunked_prefill else MAX_TOKENS,
            num_slots=num_slots,
        )
        self.scheduler.num_reserved_tokens = num_reserved_tokens
        self.started: list[str] = []
        self._windows = windows
        # Groups take different blocks of the same pages: one view of the bytes serves them all.
        (pages,) = self.storage.tensors()
        self._pages = pages.view(torch.int64).numpy()

    def open_memory(self, num_bytes: int) -> SwapFile:
        self.disk = FlakyFile(Path(tempfile.gettempdir()), num_bytes)
        return self.disk

    def abort(self, request: str) -> None:
        for sequence in self.unfinished.pop(request):
            if not sequence.is_finished:
                sequence.finish("abort")
            self.scheduler.release(sequence)

    def step(self) -> list[ScheduledChunk]:
        """A step of the engine; whatever must hold of one is checked."""
        with self._checked_schedule() as chunks:
            chunks += self.scheduler.schedule()
        for chunk in chunks:
            self.compute(chunk)
        self.settle(chunks)
        self.check_integrity()
        return chunks

    def drain(self) -> None:
        """Run all to their ends; nothing may be left, and it may not take longer than it can."""
        everything = [s for sequences in self.unfinished.values() for s in sequences]
        # In each step the first one that runs computes a token, and is never thrown back.
        most = 2 * sum(sequence.prompt_len + sequence.max_tokens for sequence in everything)
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            assert self.step()
        assert not self.scheduler.has_work
        assert not self.unfinished
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.manager.num_sequences == 0
        if isinstance(self.manager, SwappingKVCacheManager):
            assert self.manager.num_swapped == 0
            assert self.manager.swap_space.num_used_slots == 0

    def check_integrity(self) -> None:
        self.manager.check_integrity()
        self.scheduler.check_integrity()
        for sequence in self.scheduler.running:
            self._check_slots(sequence, sequence.num_computed_tokens)

    @contextmanager
    def _checked_schedule(self) -> Iterator[list[ScheduledChunk]]:
        scheduler, before = self.scheduler, list(self.scheduler.running)
        decoding = [s for s in before if s.is_decoding]
        first = min(before, key=lambda s: s.rank, default=None)
        chunks: list[ScheduledChunk] = []
        yield chunks
        chosen = [chunk.sequence for chunk in chunks]
        assert len(chosen) == len(set(chosen)) <= self.config.max_num_seqs
        assert set(chosen) <= set(scheduler.running)
        # Every sequence that decodes has its token in every step, unless it was preempted.
        assert all(s in chosen for s in decoding if s in scheduler.running)
        assert first is None or first in chosen
        victims = [sequence for sequence in before if sequence not in scheduler.running]
        assert all(victim.rank > first.rank for victim in victims if first is not None)
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if self.config.enable_chunked_prefill:
            assert num_tokens <= self.config.max_num_batched_tokens
        for sequence in chosen:
            if sequence not in before and sequence.seq_id not in self.started:
                self.started.append(sequence.seq_id)

    def compute(self, chunk: ScheduledChunk) -> None:
        sequence, begin = chunk.sequence, chunk.sequence.num_computed_tokens
        for group, table in enumerate(self.manager.block_tables(sequence.seq_id)):
            for position in range(begin, begin + chunk.num_tokens):
                self._pages[_slot(table, position)] = _content(group, sequence, position)
        super().compute(chunk)
        self._check_slots(sequence, begin)

    def next_token(self, sequence: Sequence) -> int:
        """One of few: blocks of different sequences shall often be equal."""
        return sum(sequence.token_ids[-3:]) % 2

    def _check_slots(self, sequence: Sequence, begin: int) -> None:
        """What queries from `begin` on would read is what was computed after these tokens."""
        tables = self.manager.block_tables(sequence.seq_id)
        for group, (window, table) in enumerate(zip(self._windows, tables, strict=True)):
            first = 0 if window is None else max(0, begin - window + 1)
            for position in range(first, sequence.num_computed_tokens):
                found = self._pages[_slot(table, position)]
                assert found == _content(group, sequence, position)


def _slot(table: list[int], position: int) -> tuple[int, int]:
    """Its page, and its place there."""
    return table[position // BLOCK_SIZE], position % BLOCK_SIZE


def _content(group: int, sequence: Sequence, position: int) -> int:
    return hash((group, *sequence.token_ids[: position + 1]))
