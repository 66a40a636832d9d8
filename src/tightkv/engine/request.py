"""One request: its prompt and the sequences that answer it."""

from __future__ import annotations

from dataclasses import dataclass

from tightkv.engine.outputs import RequestOutput
from tightkv.engine.sequence import Sequence, all_finished

__all__ = ["Request"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt and its `n` sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    sequences: tuple[Sequence, ...]

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
            error=next((s.error for s in self.sequences if s.error), None),
        )
