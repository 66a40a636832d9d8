"""What a streamed answer of an OpenAI server tells: when its tokens came, and how many."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tightkv.benchmark.http_client import Chunk, Response
from tightkv.benchmark.statistics import RequestTiming

__all__ = ["StreamError", "events", "read_timing"]

_SHOWN_CHARACTERS = 200
_DONE = "[DONE]"


class StreamError(Exception):
    """An answer that is an error, or not whole; the message says which."""


def read_timing(response: Response, prompt_tokens: int) -> RequestTiming:
    """When the tokens of an answer came.

    As in `vllm bench serve`, each event with a choice is a token, also one whose text is empty;
    but not an event that only names the role. Counts are the server's, if it tells them.

    Args:
        response: of /v1/completions or /v1/chat/completions, as a stream.
        prompt_tokens: length of the prompt, as far as the client knows.
    """
    try:
        return _read(response, prompt_tokens)
    except StreamError as error:
        return RequestTiming(response.start, prompt_tokens=prompt_tokens, error=str(error))


def events(chunks: Iterable[Chunk]) -> list[tuple[float, str]]:
    """Server-sent events, each with the time at which it was complete.

    Events with one line of data each, as all these servers send; comments are left out.
    """
    found, rest = [], b""
    for time, data in chunks:
        *lines, rest = (rest + data).split(b"\n")
        found += [
            (time, line[len(b"data:") :].strip().decode())
            for line in lines
            if line.startswith(b"data:")
        ]
    return found


def _read(response: Response, prompt_tokens: int) -> RequestTiming:
    if response.status != 200:
        raise StreamError(f"status {response.status}: {_message(response.text)}")
    times: list[float] = []
    usage: dict[str, Any] = {}
    is_done, reason = False, None
    for time, text in events(response.chunks):
        if text == _DONE:
            is_done = True
            break
        event = _parsed(text)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            reason = choice.get("finish_reason") or reason
            if not _only_names_the_role(choice):
                times.append(time)
    if not times:
        raise StreamError(f"no token came: {_message(response.text)}")
    # Some servers end without [DONE], but none without a reason.
    if not is_done and reason is None:
        raise StreamError("the stream ended before the answer did")
    details = usage.get("prompt_tokens_details") or {}
    return RequestTiming(
        start=response.start,
        token_times=tuple(times),
        prompt_tokens=usage.get("prompt_tokens", prompt_tokens),
        output_tokens=usage.get("completion_tokens") or len(times),
        cached_tokens=details.get("cached_tokens"),
    )


def _only_names_the_role(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None or choice.get("finish_reason"):
        return False
    return "role" in delta and not any(value for name, value in delta.items() if name != "role")


def _parsed(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except json.JSONDecodeError as error:
        raise StreamError(f"an event is no JSON: {text[:_SHOWN_CHARACTERS]}") from error
    if not isinstance(event, dict):
        raise StreamError(f"an event is no object: {text[:_SHOWN_CHARACTERS]}")
    if "error" in event:
        raise StreamError(f"the server answered with an error: {_message(text)}")
    return event


def _message(text: str) -> str:
    """What an error of OpenAI's shape says, or else the beginning of the text, in one line."""
    try:
        error = json.loads(text)["error"]
        said = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        said = text
    return " ".join(said.split())[:_SHOWN_CHARACTERS] or "nothing"
