"""What a streamed answer tells: when its tokens came, how many, and whether it is whole."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tightkv.benchmark.http_client import Chunk
from tightkv.benchmark.stream import StreamError, events

__all__ = ["Answer", "percentile", "read_answer", "summarize"]


@dataclass(frozen=True)
class Answer:
    """A request that was answered.

    Attributes:
        ttft: seconds from the request to the first text, or to the end of an answer whose tokens
            have none (special ones).
        seconds: from the request to the end of the stream.
        new_tokens: of the answer.
        prompt_tokens: None if the server does not tell.
    """

    ttft: float
    seconds: float
    new_tokens: int
    prompt_tokens: int | None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is none."""
        if self.new_tokens < 2:
            return None
        return (self.seconds - self.ttft) / (self.new_tokens - 1)


def read_answer(start: float, chunks: Iterable[Chunk], max_tokens: int) -> Answer:
    """What a stream of /v1/completions says.

    A server that tells no usage has made `max_tokens` tokens if it says that it stopped for them,
    or else one per event with text.

    Args:
        start: time of the request.
        chunks: what arrived.
        max_tokens: tokens that were asked for.

    Raises:
        StreamError: if the stream holds an error, or lacks its end.
    """
    first: float | None = None
    reason, num_events, usage = None, 0, None
    for time, text in events(chunks):
        if text == "[DONE]":
            if reason is None:
                raise StreamError("the answer has no finish_reason")
            made = max_tokens if reason == "length" else num_events
            return Answer(
                ttft=(time if first is None else first) - start,
                seconds=time - start,
                new_tokens=made if usage is None else usage["completion_tokens"],
                prompt_tokens=None if usage is None else usage["prompt_tokens"],
            )
        event = _parsed(text)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            reason = choice.get("finish_reason") or reason
            if choice.get("text"):
                first, num_events = time if first is None else first, num_events + 1
    raise StreamError("the stream ended without [DONE]")


def _parsed(text: str) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise StreamError(f"an event is no JSON: {text[:100]}") from error
    if "error" in event:
        raise StreamError(f"an error came: {event['error']}")
    return event


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Between the nearest values, so that 0 is the least and 100 the greatest; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarize(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Figures of a load.

    Args:
        answers: at least one.
        seconds: that the load took.

    Returns:
        Rates per second; times in seconds. `latency_per_token` counts the wait for the first token.
    """
    ttfts = [answer.ttft for answer in answers]
    tokens = sum(answer.new_tokens for answer in answers)
    read = [answer.prompt_tokens for answer in answers if answer.prompt_tokens is not None]
    return {
        "seconds": seconds,
        "answered": len(answers),
        "requests_per_second": len(answers) / seconds,
        "output_tokens_per_second": tokens / seconds,
        "ttft_p50": percentile(ttfts, 50),
        "ttft_p99": percentile(ttfts, 99),
        "tpot_p50": percentile([each.tpot for each in answers if each.tpot is not None], 50),
        "latency_p50": statistics.median(answer.seconds for answer in answers),
        "latency_per_token_p50": statistics.median(
            answer.seconds / answer.new_tokens for answer in answers
        ),
        "new_tokens": tokens,
        "prompt_tokens": sum(read) if len(read) == len(answers) else None,
    }
