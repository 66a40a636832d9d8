"""Token counts of an answer."""

from __future__ import annotations

from typing import Any

from tightkv.engine.outputs import RequestDelta

__all__ = ["Usage"]


class Usage:
    """Counts as they grow."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}

    def note(self, which: int, delta: RequestDelta) -> None:
        """Take what has come to one of the prompts."""
        self._num_cached_tokens[which] = delta.num_cached_tokens
        self._num_completion_tokens += sum(len(each.token_ids) for each in delta.completions)

    def as_json(self, *, hides_completion: bool = False) -> dict[str, Any]:
        """As OpenAI writes it; `cached_tokens` are prefix hits.

        Args:
            hides_completion: whether only the prompt was asked for (`echo` with `max_tokens` 0).
        """
        completion = 0 if hides_completion else self._num_completion_tokens
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._num_prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }
