"""Traces of production: when requests came, how long they were, and what they had in common."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from tightkv.errors import RequestError

__all__ = [
    "MOONCAKE_BLOCK",
    "TracedRequest",
    "fitting_factor",
    "read_azure",
    "read_mooncake",
    "scaled",
]

MOONCAKE_BLOCK = 512
"""Tokens that one of a Mooncake trace's hash ids stands for."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of a trace.

    Attributes:
        arrival: seconds after the first one.
        prompt: tokens.
        answer: tokens.
        blocks: ids of the prompt's parts of `block_size` tokens; equal ids are equal tokens.
    """

    arrival: float
    prompt: int
    answer: int
    blocks: tuple[int, ...] = ()
    block_size: int = MOONCAKE_BLOCK


def read_azure(path: Path, count: int) -> list[TracedRequest]:
    """The first requests of a file with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

    Raises:
        RequestError: if it cannot be read, or has fewer requests.
    """
    rows = list(csv.DictReader(_text(path).splitlines()))[:count]
    try:
        times = [datetime.fromisoformat(row["TIMESTAMP"]) for row in rows]
        lengths = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"{path} is no Azure trace ({error}): it needs the columns TIMESTAMP, ContextTokens "
            "and GeneratedTokens, a time and two numbers."
        ) from error
    _check_count(path, len(rows), count)
    return [
        TracedRequest((time - times[0]).total_seconds(), max(1, prompt), max(1, answer))
        for time, (prompt, answer) in zip(times, lengths, strict=True)
    ]


def read_mooncake(path: Path, count: int) -> list[TracedRequest]:
    """The first requests of JSON lines with timestamp (ms), input_length, output_length, hash_ids.

    Raises:
        RequestError: if it cannot be read, or has fewer requests.
    """
    lines = [line for line in _text(path).splitlines() if line.strip()][:count]
    requests = [_mooncake(path, number, line) for number, line in enumerate(lines, start=1)]
    _check_count(path, len(requests), count)
    return [replace(each, arrival=each.arrival - requests[0].arrival) for each in requests]


def scaled(requests: Sequence[TracedRequest], longest: int) -> list[TracedRequest]:
    """All lengths times one factor, at most 1, so that the longest request fits.

    Args:
        requests: as in the trace.
        longest: tokens that a prompt and its answer may have together, at least 2.
    """
    factor = fitting_factor((each.prompt + each.answer for each in requests), longest)
    return [
        replace(
            each,
            prompt=max(1, math.floor(each.prompt * factor)),
            answer=max(1, math.floor(each.answer * factor)),
            block_size=max(1, math.floor(each.block_size * factor)),
        )
        for each in requests
    ]


def fitting_factor(lengths: Iterable[int], longest: int) -> float:
    """The factor, at most 1, that makes the greatest of these lengths fit."""
    return min(1.0, longest / max(lengths))


def _mooncake(path: Path, number: int, line: str) -> TracedRequest:
    try:
        entry = json.loads(line)
        return TracedRequest(
            arrival=float(entry["timestamp"]) / 1e3,
            prompt=max(1, int(entry["input_length"])),
            answer=max(1, int(entry["output_length"])),
            blocks=tuple(int(block) for block in entry.get("hash_ids", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"{path}, line {number}, is no request of a Mooncake trace ({error}): it needs "
            "timestamp, input_length and output_length."
        ) from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read ({error}): check --dataset-path.") from error


def _check_count(path: Path, found: int, count: int) -> None:
    if found < count:
        raise RequestError(
            f"{path} has {found} requests, and {count} were asked for: lower --num-prompts."
        )
