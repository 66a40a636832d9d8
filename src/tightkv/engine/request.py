"""One request: its prompt and the sequences that answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tightkv.engine.outputs import Logprob, RequestDelta, RequestOutput
from tightkv.engine.sequence import Sequence, all_finished
from tightkv.errors import TightKVError

__all__ = ["Request"]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and its `n` sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    sequences: tuple[Sequence, ...]
    _has_told_prompt_logprobs: bool = field(default=False, init=False)

    @property
    def is_finished(self) -> bool:
        return all_finished(self.sequences)

    def output(self) -> RequestOutput:
        """The request as it is now."""
        first = self.sequences[0]
        wants_prompt_logprobs = first.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=tuple(sequence.completion() for sequence in self.sequences),
            finished=self.is_finished,
            num_cached_tokens=first.num_cached_tokens or 0,
            prompt_logprobs=tuple(first.prompt_logprobs) if wants_prompt_logprobs else None,
            error=self.error,
        )

    @property
    def error(self) -> str | None:
        """Why the request failed; None if it did not."""
        return str(self.failure) if self.failure else None

    @property
    def failure(self) -> TightKVError | None:
        """The same as what to raise: a RequestError where the request itself is wrong."""
        return next((sequence.error for sequence in self.sequences if sequence.error), None)

    def take_delta(self) -> RequestDelta:
        """What has come since the last call."""
        taken = (sequence.take_delta() for sequence in self.sequences)
        return RequestDelta(
            completions=tuple(delta for delta in taken if delta is not None),
            finished=self.is_finished,
            num_cached_tokens=self.sequences[0].num_cached_tokens or 0,
            prompt_logprobs=self._take_prompt_logprobs(),
            failure=self.failure,
        )

    def _take_prompt_logprobs(self) -> tuple[Mapping[int, Logprob] | None, ...] | None:
        first = self.sequences[0]
        is_due = first.params.prompt_logprobs is not None and not first.needs_prompt_logprobs
        if self._has_told_prompt_logprobs or not is_due:
            return None
        self._has_told_prompt_logprobs = True
        return tuple(first.prompt_logprobs)
