"""What is measured of one request, where its tokens are made."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RequestStats"]


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """Times and counts of one request. Times are seconds of `time.monotonic()`.

    Attributes:
        arrival_time: when the server had read it.
        num_prompt_tokens: length of the prompt.
        n: completions asked for.
        max_tokens: most tokens of a completion; None: up to the model's limit.
        scheduled_time: begin of the first step that it took part in.
        first_token_time: when its first token was made.
        last_token_time: when its latest token was made.
        finished_time: when its last completion ended.
        num_generation_tokens: tokens made, of all completions.
        num_cached_tokens: prompt tokens that the prefix cache gave.
        num_preemptions: how often it lost its blocks.
        finished_reason: stop, length, abort or error.
    """

    arrival_time: float
    num_prompt_tokens: int
    n: int = 1
    max_tokens: int | None = None
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finished_reason: str | None = None
