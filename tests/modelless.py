"""Scheduler and cache manager without a model, and with a memory of what each slot should hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from transformers import PreTrainedTokenizerBase

from tightkv import SamplingParams
from tightkv.config import SchedulerConfig
from tightkv.engine.detokenizer import IncrementalDetokenizer
from tightkv.engine.sampler import SamplingState
from tightkv.engine.scheduler import ScheduledChunk, Scheduler
from tightkv.engine.sequence import Sequence
from tightkv.kvcache import KVCacheManager
from tightkv.metrics import EngineStats

BLOCK_SIZE = 4
MAX_TOKENS = 64
"""Of a sequence."""
PARAMS = SamplingParams(detokenize=False)
_NO_TOKENIZER = cast(PreTrainedTokenizerBase, None)  # PARAMS ask for none


class Modelless:
    """An engine whose every token depends on all before it, so that a wrong slot is noticed.

    Attributes:
        unfinished: sequences by the name of their request.
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
    ) -> None:
        self.stats = EngineStats()
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        self.manager = KVCacheManager(
            windows,
            num_blocks,
            BLOCK_SIZE,
            b"",
            prefix_caching,
            max_chunk=max_num_batched_tokens if enable_chunked_prefill else MAX_TOKENS,
        )
        self.scheduler = Scheduler(self.config, self.manager, self.stats)
        self.scheduler.num_reserved_tokens = num_reserved_tokens
        self.unfinished: dict[str, list[Sequence]] = {}
        self.started: list[str] = []
        self._windows = windows
        self._slots: dict[int, tuple[int, ...]] = {}

    def add(
        self,
        request: str,
        prompt: list[int],
        max_tokens: int,
        *,
        n: int = 1,
        priority: int = 0,
    ) -> list[Sequence]:
        sequences: list[Sequence] = []
        for index in range(n):
            sequences.append(
                Sequence(
                    seq_id=f"{request}/{index}",
                    request_id=request,
                    index=index,
                    params=PARAMS,
                    prompt_len=len(prompt),
                    token_ids=list(prompt),
                    max_tokens=max_tokens,
                    sampling=SamplingState.create(PARAMS, prompt, 0),
                    detokenizer=IncrementalDetokenizer(_NO_TOKENIZER, prompt, PARAMS),
                    hasher=self.manager.new_hasher(request),
                    leader=sequences[0] if index else None,
                )
            )
            self.scheduler.add(sequences[-1], priority)
        self.unfinished[request] = sequences
        return sequences

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
            self._compute(chunk)
        for sequence in (chunk.sequence for chunk in chunks):
            self.manager.remember_blocks(
                sequence.seq_id, sequence.token_ids, sequence.num_computed_tokens
            )
            if sequence.is_finished:
                self.scheduler.release(sequence)
        for request, sequences in list(self.unfinished.items()):
            if all(sequence.is_finished for sequence in sequences):
                del self.unfinished[request]
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

    def _compute(self, chunk: ScheduledChunk) -> None:
        sequence, completes = chunk.sequence, chunk.completes
        begin = sequence.num_computed_tokens
        end = begin + chunk.num_tokens
        for group, table in enumerate(self.manager.block_tables(sequence.seq_id)):
            for position in range(begin, end):
                self._slots[_slot(table, position)] = _content(group, sequence, position)
        sequence.num_computed_tokens = end
        self._check_slots(sequence, begin)
        if completes:
            # Few different tokens: blocks of different sequences shall often be equal.
            sequence.token_ids.append(sum(sequence.token_ids[-3:]) % 2)
            if sequence.num_output_tokens >= sequence.max_tokens:
                sequence.finish("length")

    def _check_slots(self, sequence: Sequence, begin: int) -> None:
        """What queries from `begin` on would read is what was computed after these tokens."""
        tables = self.manager.block_tables(sequence.seq_id)
        for group, (window, table) in enumerate(zip(self._windows, tables, strict=True)):
            first = 0 if window is None else max(0, begin - window + 1)
            for position in range(first, sequence.num_computed_tokens):
                found = self._slots[_slot(table, position)]
                assert found == _content(group, sequence, position)


def _slot(table: list[int], position: int) -> int:
    return table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def _content(group: int, sequence: Sequence, position: int) -> tuple[int, ...]:
    return group, *sequence.token_ids[: position + 1]
