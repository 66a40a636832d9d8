"""Which sequences take part in a step, with how many tokens: continuous batching.

All sequences have one order: by priority, then by arrival. Running ones come first, then waiting
ones as far as token budget, sequence limit and blocks allow, and until the step has work enough.
When the pool is full a sequence that needs a block takes it from one behind it in the order: that
one is preempted, its blocks are given up, and it is computed anew later, to the same tokens, or
they are moved to the swap space, and it goes on where it was (`engine/preemption.py`).
docs/scheduling.md has the rules, what they guarantee, and what they cost.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from tightkv.config import SchedulerConfig
from tightkv.engine.preemption import Preemption, Recomputation
from tightkv.engine.sequence import Sequence, SequenceStatus
from tightkv.kvcache import KVCacheManager
from tightkv.metrics import EngineStats

__all__ = ["MAX_PROMPT_LOGPROBS_ROWS", "ScheduledChunk", "Scheduler"]

MAX_PROMPT_LOGPROBS_ROWS = 128
"""Rows of logits that one step makes for prompt log-probabilities, besides the sampled ones."""


_ENOUGH_PROMPT_TOKENS = 192
"""Prompt tokens with which a step is long enough. A processor is busy with 64 (SmolLM2-135M, two
cores: 1.18 ms a token with 64, 1.12 with 192), and another prompt makes these wait; but each step
also computes a token of all that decode, which the last of a crowd waits for."""


_RESERVED_TOKENS = 64
"""Tokens that every running sequence shall still have room for when another one begins. Measured in
docs/scheduling.md: with less, more is lost to preemption; with more, fewer run at once."""


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
class _PromptBudget:
    """What a step may still hold of prompts, besides a token of each sequence that decodes."""

    num_tokens: int
    num_rows: int = MAX_PROMPT_LOGPROBS_ROWS
    num_taken: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether to begin another prompt in a later step."""
        return self.num_taken >= _ENOUGH_PROMPT_TOKENS

    def take(self, sequence: Sequence, num_tokens: int) -> ScheduledChunk:
        # Below 0 by a whole prompt that is longer than the budget.
        self.num_tokens = max(0, self.num_tokens - num_tokens)
        self.num_taken += num_tokens
        if sequence.needs_prompt_logprobs:
            self.num_rows -= num_tokens
        return ScheduledChunk(sequence, num_tokens)


class Scheduler:
    """Holds the waiting and the running sequences, each in their order.

    Attributes:
        num_reserved_tokens: for which every running sequence shall have room when one begins.
    """

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
        self._num_added = 0
        self.num_reserved_tokens = _RESERVED_TOKENS
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence, priority: int = 0) -> None:
        """Let a sequence wait; of the waiting ones those of the lowest `priority` start first."""
        self._num_added += 1
        sequence.rank = (priority, self._num_added)
        insort(self.waiting, sequence, key=_rank)

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
        num_decodes = sum(sequence.is_decoding for sequence in self.running)
        budget = _PromptBudget(self._config.max_num_batched_tokens - num_decodes)
        chunks = self._schedule_running(budget)
        if self._stats.num_preemptions == before:
            chunks += self._admit(budget)
        return chunks

    def check_integrity(self) -> None:
        """Raise AssertionError if the sequences contradict each other or their blocks."""
        for name, sequences in (("running", self.running), ("waiting", self.waiting)):
            assert sequences == sorted(sequences, key=_rank), f"{name} sequences out of order"
            for sequence in sequences:
                about = f"{name} sequence {sequence.seq_id}"
                assert sequence.status.value == name, f"{about} is {sequence.status.value}"
                held = self._manager.num_blocks_of(sequence.seq_id)
                is_swapped = self._preemption.is_swapped(sequence)
                computed = 0 if is_swapped else sequence.num_computed_tokens
                least = self._manager.blocks_seen(computed)
                most = self._manager.blocks_for(sequence.num_tokens) if name == "running" else 0
                assert least <= held <= most, f"{about} has {held} blocks, not {least} to {most}"
        assert self._manager.num_sequences == len(self.running), "blocks of nobody's sequence"

    def _schedule_running(self, budget: _PromptBudget) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        # Only sequences behind this one leave the list meanwhile, or this one, if it is the last.
        for index, sequence in enumerate(self.running):
            is_decoding = sequence.is_decoding
            num_tokens = 1 if is_decoding else self._chunk_size(sequence, budget)
            if num_tokens == 0 or not self._make_room(index, num_tokens):
                continue
            chunks.append(
                ScheduledChunk(sequence, 1) if is_decoding else budget.take(sequence, num_tokens)
            )
        return chunks

    def _make_room(self, index: int, num_tokens: int) -> bool:
        """Allocate, preempting others until it fits; False: none was left but the sequence."""
        sequence = self.running[index]
        computed = sequence.num_computed_tokens
        while not self._manager.allocate_slots(sequence.seq_id, computed + num_tokens, computed):
            victim = self._victim(index)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self, index: int) -> Sequence:
        """Behind the sequence that needs room, of the least urgent the cheapest; or it itself.

        Nobody is preempted for one behind it: the first of all always comes to its end, then the
        next one is the first.
        """
        behind = self.running[:index:-1]
        if not behind:
            return self.running[index]
        least_urgent = behind[0].rank[0]
        return min(
            (sequence for sequence in behind if sequence.rank[0] == least_urgent), key=self._cost
        )

    def _cost(self, sequence: Sequence) -> int:
        """Computed tokens that are lost if the sequence is preempted."""
        shared = self._manager.num_shared_blocks_of(sequence.seq_id)
        return sequence.num_computed_tokens - shared * self._manager.block_size

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._preemption.take_blocks(victim)
        self._stats.num_preemptions += 1
        victim.status = SequenceStatus.WAITING
        victim.num_preemptions += 1
        insort(self.waiting, victim, key=_rank)

    def _admit(self, budget: _PromptBudget) -> list[ScheduledChunk]:
        """Begin waiting sequences in their order: none is overtaken but for one that must wait."""
        admitted: list[ScheduledChunk] = []
        position = 0
        while position < len(self.waiting) and self._may_start(budget):
            sequence = self.waiting[position]
            if sequence.waits_for_leader:
                position += 1
                continue
            chunk = self._start(sequence, budget)
            if chunk is None:
                break
            del self.waiting[position]
            admitted.append(chunk)
        return admitted

    def _may_start(self, budget: _PromptBudget) -> bool:
        has_budget = budget.num_tokens > 0 and not budget.is_busy
        return len(self.running) < self._config.max_num_seqs and has_budget

    def _start(self, sequence: Sequence, budget: _PromptBudget) -> ScheduledChunk | None:
        """Begin a waiting sequence, if all of its tokens have room now, and the others' next."""
        num_reserved = self._num_reserved_blocks()
        if self._manager.lacks_room(sequence.seq_id, num_reserved):
            return None
        if self._preemption.is_swapped(sequence):
            return self._resume(sequence, budget, num_reserved)
        limit = 0 if sequence.needs_prompt_logprobs else sequence.num_tokens - 1
        num_cached = self._manager.get_computed_blocks(
            sequence.seq_id,
            sequence.hasher,
            sequence.token_ids,
            limit,
            num_reserved=num_reserved,
        )
        sequence.num_computed_tokens = num_cached
        num_tokens = self._chunk_size(sequence, budget)
        # Room for the whole of it, or it would be the next to be preempted.
        if num_tokens == 0 or not self._manager.allocate_slots(
            sequence.seq_id,
            sequence.num_tokens,
            num_cached,
            num_reserved=num_reserved,
        ):
            self._manager.refuse(sequence.seq_id, sequence.num_tokens)
            sequence.num_computed_tokens = 0
            return None
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached
            self._stats.prefix_cache_queries += sequence.prompt_len
            self._stats.prefix_cache_hits += num_cached
        return self._run(sequence, num_tokens, budget)

    def _resume(
        self, sequence: Sequence, budget: _PromptBudget, num_reserved: int
    ) -> ScheduledChunk | None:
        """Go on with a sequence whose blocks were moved, if all of its tokens have room now."""
        num_tokens = self._chunk_size(sequence, budget)
        if num_tokens == 0:
            return None
        if self._preemption.bring_back(sequence, num_reserved):
            return self._run(sequence, num_tokens, budget)
        return None if self._preemption.is_swapped(sequence) else self._start(sequence, budget)

    def _run(self, sequence: Sequence, num_tokens: int, budget: _PromptBudget) -> ScheduledChunk:
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_rank)
        return budget.take(sequence, num_tokens)

    def _num_reserved_blocks(self) -> int:
        """Blocks for the next tokens of those that run; 0 if none does."""
        return sum(map(self._num_blocks_soon, self.running))

    def _num_blocks_soon(self, sequence: Sequence) -> int:
        longest = sequence.prompt_len + sequence.max_tokens
        end = min(sequence.num_tokens + self.num_reserved_tokens, longest)
        if end <= sequence.num_tokens:
            return 0
        return self._manager.num_blocks_until(sequence.seq_id, end)

    def _chunk_size(self, sequence: Sequence, budget: _PromptBudget) -> int:
        """Prompt tokens of the sequence that still fit into the step; 0 if none."""
        wanted = sequence.num_uncomputed_tokens
        if sequence.needs_prompt_logprobs:
            return min(wanted, budget.num_tokens, budget.num_rows)
        if self._config.enable_chunked_prefill:
            return min(wanted, budget.num_tokens)
        # Whole prompts only; one that is longer than the budget is the only one of its step.
        return wanted if wanted <= budget.num_tokens or budget.num_taken == 0 else 0


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
