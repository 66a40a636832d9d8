"""One completion on its way through the engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from tightkv.engine.detokenizer import IncrementalDetokenizer
from tightkv.engine.outputs import CompletionDelta, CompletionOutput, FinishReason, Logprob
from tightkv.engine.sampler import SamplingState
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import TightKVError
from tightkv.kvcache.block_hash import BlockHasher

__all__ = ["Sequence", "SequenceStatus"]


class SequenceStatus(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one completion, and how far they have come.

    Attributes:
        token_ids: prompt and answer in one list.
        max_tokens: tokens of the answer at most, limits of the model included.
        leader: the first sequence of the same request, whose prompt blocks this one shares.
        rank: priority and number of arrival; the lower comes first.
        num_computed_tokens: tokens whose K and V are in the cache or the swap space; 0 again after
            preemption by recomputation.
        num_cached_tokens: prompt tokens that the prefix cache gave at the first start.
        error: why it failed; a RequestError where the request itself is wrong.
        prompt_logprobs: of the prompt tokens so far, where they were asked for.
    """

    seq_id: str
    request_id: str
    index: int
    params: SamplingParams
    prompt_len: int
    token_ids: list[int]
    max_tokens: int
    sampling: SamplingState
    detokenizer: IncrementalDetokenizer
    hasher: BlockHasher
    leader: Sequence | None = None
    rank: tuple[int, int] = (0, 0)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: TightKVError | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    num_preemptions: int = 0
    _num_taken: int = 0
    _has_told_the_end: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether logits of the prompt's rows are still wanted."""
        return (
            self.index == 0
            and self.params.prompt_logprobs is not None
            and len(self.prompt_logprobs) < self.prompt_len
        )

    @property
    def is_decoding(self) -> bool:
        """Whether the next token is all that there is to compute."""
        is_next = len(self.token_ids) - self.num_computed_tokens == 1
        return is_next and not self.needs_prompt_logprobs

    @property
    def waits_for_leader(self) -> bool:
        """Whether the blocks this sequence will share are still being made."""
        leader = self.leader
        return (
            leader is not None
            and not leader.is_finished
            and leader.num_computed_tokens < leader.prompt_len
        )

    def finish(
        self,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: TightKVError | None = None,
    ) -> None:
        """End the sequence; its blocks are freed by the scheduler."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
        self.detokenizer.finish()

    def completion(self) -> CompletionOutput:
        """What the request sees of it now."""
        wants_logprobs = self.params.logprobs is not None
        has_sum = wants_logprobs or self.params.forced_token_ids is not None
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.text,
            token_ids=tuple(itertools.islice(self.token_ids, self.prompt_len, None)),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=self.cumulative_logprob if has_sum else None,
            logprobs=tuple(self.logprobs) if wants_logprobs else None,
        )

    def take_delta(self) -> CompletionDelta | None:
        """What has come since the last call; None if nothing has."""
        first, told_the_end = self._num_taken, self._has_told_the_end
        if told_the_end or (first == self.num_output_tokens and not self.is_finished):
            return None
        self._num_taken = self.num_output_tokens
        self._has_told_the_end = self.is_finished
        wants_logprobs = self.params.logprobs is not None
        return CompletionDelta(
            index=self.index,
            text=self.detokenizer.take_new_text(),
            token_ids=tuple(self.token_ids[self.prompt_len + first :]),
            logprobs=tuple(self.logprobs[first:]) if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


def all_finished(sequences: Iterable[Sequence]) -> bool:
    return all(sequence.is_finished for sequence in sequences)
