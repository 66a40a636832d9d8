"""Which sequences take part in a step, with how many tokens: continuous batching.

Running sequences come first, oldest first, then new ones as far as token budget, sequence limit
and blocks allow, and until the step has work enough. When the pool is full the youngest running
sequence is preempted: its blocks are given up, and it is computed anew later, to the same tokens,
or they are moved to the swap space, and it goes on where it was (`engine/preemption.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tightkv.config import SchedulerConfig
from tightkv.engine.preemption import Preemption, Recomputation
from tightkv.engine.sequence import Sequence, SequenceStatus
from tightkv.kvcache import KVCacheManager
from tightkv.metrics import EngineStats

__all__ = ["MAX_PROMPT_LOGPROBS_ROWS", "ScheduledChunk", "Scheduler"]

MAX_PROMPT_LOGPROBS_ROWS = 128
"""Rows of logits that one step makes for prompt log-probabilities, besides the sampled ones."""


_ENOUGH_PROMPT_TOKENS = 64
"""Prompt tokens with which a step keeps a processor busy (SmolLM2-135M, two cores: 1.18 ms a token
with 64 of them, 1.26 with 256). Another prompt would not be done sooner, only make these wait."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `num_tokens` uncomputed tokens of a sequence."""

    sequence: Sequence
    num_tokens: int

    @property
    def completes(self) -> bool:
        """Whether the sequence's next token can be sampled after this chunk."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


@dataclass(slots=True)
class _StepBudget:
    """What a step may still hold."""

    num_tokens: int
    num_prompt_rows: int = MAX_PROMPT_LOGPROBS_ROWS
    num_prompt_tokens: int = 0
    is_untouched: bool = True

    @property
    def is_busy(self) -> bool:
        """Whether to begin another prompt in a later step."""
        return self.num_prompt_tokens >= _ENOUGH_PROMPT_TOKENS

    def take(self, sequence: Sequence, num_tokens: int) -> ScheduledChunk:
        self.num_tokens -= num_tokens
        if num_tokens > 1:
            self.num_prompt_tokens += num_tokens
        if sequence.needs_prompt_logprobs:
            self.num_prompt_rows -= num_tokens
        self.is_untouched = False
        return ScheduledChunk(sequence, num_tokens)


class Scheduler:
    """Holds the waiting and the running sequences."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        stats: EngineStats,
        preemption: Preemption | None = None,
    ) -> None:
        """Start with no sequence; `preemption` is by recomputation unless another is given."""
        self._config = config
        self._manager = manager
        self._stats = stats
        self._preemption = preemption or Recomputation(manager, stats)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Let go of a finished sequence and its blocks, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._manager.free(sequence.seq_id)

    def schedule(self) -> list[ScheduledChunk]:
        """Choose the chunks of one step; their slots are allocated."""
        before = self._stats.num_preemptions
        budget = _StepBudget(self._config.max_num_batched_tokens)
        chunks = self._schedule_running(budget)
        if self._stats.num_preemptions == before:
            chunks += self._admit(budget)
        return chunks

    def _schedule_running(self, budget: _StepBudget) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        for sequence in list(self.running):
            num_tokens = self._chunk_size(sequence, budget)
            if num_tokens == 0 or sequence.status is not SequenceStatus.RUNNING:
                continue
            if self._make_room(sequence, num_tokens):
                chunks.append(budget.take(sequence, num_tokens))
        return chunks

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate, preempting the youngest until it fits; False: the sequence was it."""
        needed = sequence.num_computed_tokens + num_tokens
        while not self._manager.allocate_slots(sequence.seq_id, needed):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._preemption.take_blocks(victim)
        self._stats.num_preemptions += 1
        victim.status = SequenceStatus.WAITING
        victim.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _admit(self, budget: _StepBudget) -> list[ScheduledChunk]:
        admitted: list[ScheduledChunk] = []
        held_back: list[Sequence] = []
        while self.waiting and self._may_start(budget):
            sequence = self.waiting.popleft()
            if sequence.waits_for_leader:
                held_back.append(sequence)
                continue
            chunk = self._start(sequence, budget)
            if chunk is None:
                self.waiting.appendleft(sequence)
                break
            admitted.append(chunk)
        self.waiting.extendleft(reversed(held_back))
        return admitted

    def _may_start(self, budget: _StepBudget) -> bool:
        return len(self.running) < self._config.max_num_seqs and not budget.is_busy

    def _start(self, sequence: Sequence, budget: _StepBudget) -> ScheduledChunk | None:
        """Begin a waiting sequence, if all of its tokens have room now."""
        if self._preemption.is_swapped(sequence):
            return self._resume(sequence, budget)
        limit = 0 if sequence.needs_prompt_logprobs else sequence.num_tokens - 1
        num_cached = self._manager.get_computed_blocks(
            sequence.seq_id, sequence.hasher, sequence.token_ids, limit
        )
        sequence.num_computed_tokens = num_cached
        num_tokens = self._chunk_size(sequence, budget)
        # Room for the whole of it, or it would be the next to be preempted.
        if num_tokens == 0 or not self._manager.allocate_slots(
            sequence.seq_id, sequence.num_tokens
        ):
            self._manager.free(sequence.seq_id)
            sequence.num_computed_tokens = 0
            return None
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
            self._stats.prefix_cache_queries += sequence.prompt_len
            self._stats.prefix_cache_hits += num_cached
        return self._run(sequence, num_tokens, budget)

    def _resume(self, sequence: Sequence, budget: _StepBudget) -> ScheduledChunk | None:
        """Go on with a sequence whose blocks were moved, if all of its tokens have room now."""
        num_tokens = self._chunk_size(sequence, budget)
        if num_tokens == 0:
            return None
        if self._preemption.bring_back(sequence):
            return self._run(sequence, num_tokens, budget)
        return None if self._preemption.is_swapped(sequence) else self._start(sequence, budget)

    def _run(self, sequence: Sequence, num_tokens: int, budget: _StepBudget) -> ScheduledChunk:
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        return budget.take(sequence, num_tokens)

    def _chunk_size(self, sequence: Sequence, budget: _StepBudget) -> int:
        """Tokens of the sequence that still fit into the step; 0 if none."""
        wanted = sequence.num_uncomputed_tokens
        if sequence.needs_prompt_logprobs:
            return min(wanted, budget.num_tokens, budget.num_prompt_rows)
        if self._config.enable_chunked_prefill:
            return min(wanted, budget.num_tokens)
        # Whole prompts only; one that is longer than the budget has a step to itself.
        return wanted if wanted <= budget.num_tokens or budget.is_untouched else 0
