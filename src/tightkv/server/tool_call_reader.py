"""Tool calls and content, read from a text that comes in pieces."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tightkv.server.tool_call_styles import ToolCallStyle

__all__ = ["Delta", "ToolCallReader"]

Delta = dict[str, Any]
"""The `delta` of a choice in OpenAI's streams: `{"content": ...}` or `{"tool_calls": [...]}`."""

_NOT_BLANK = re.compile(r"\S")
_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'\\.|"', re.DOTALL)


class ToolCallReader:
    """Splits the text of one choice, as it comes, into content and calls.

    What it returns are deltas of OpenAI's streams: `{"content": ...}` or `{"tool_calls": [...]}`.
    A call comes in one delta, when it is whole, because only then it is known to be one. Blanks
    around calls are dropped, as are calls beyond the first where one is the limit. How the text
    was cut into pieces changes neither calls nor content.

    Attributes:
        num_calls: calls returned so far.
    """

    def __init__(
        self,
        style: ToolCallStyle | None,
        names: frozenset[str],
        *,
        at_most_one: bool = False,
        has_content: bool = True,
    ) -> None:
        """Begin a text.

        Args:
            style: how calls are written; None if all text is content.
            names: functions that may be called; a call of any other is content.
            at_most_one: drop calls after the first.
            has_content: whether there may be text besides calls; if not, what is no call is one
                that max_tokens has cut, and dropped.
        """
        self.num_calls = 0
        self._style = style
        self._names = names
        self._at_most_one = at_most_one
        self._has_content = has_content
        self._buffer = ""  # what is neither returned nor dropped yet
        self._body_at = 0  # where in it the JSON of a call begins
        self._scanner = _JSONScanner(0)
        self._may_be_bare = style is not None and style.has_bare_calls
        self._read_next: Callable[[ToolCallStyle, bool], list[Delta] | None] = self._read_text

    def feed(self, piece: str) -> list[Delta]:
        """Take the next piece of text; returns what is certain now."""
        if self._style is None:
            return [{"content": piece}] if piece else []
        self._buffer += piece
        return self._read(self._style, is_last=False)

    def finish(self) -> list[Delta]:
        """End the text; returns what was held back."""
        return [] if self._style is None else self._read(self._style, is_last=True)

    def _read(self, style: ToolCallStyle, is_last: bool) -> list[Delta]:
        deltas: list[Delta] = []
        # Each method takes from the buffer, names its successor, and gives None to wait for more.
        while (more := self._read_next(style, is_last)) is not None:
            deltas += more
        return deltas

    def _read_text(self, style: ToolCallStyle, is_last: bool) -> list[Delta] | None:
        """Outside of calls: everything before the next mark is content."""
        if self._may_be_bare:
            start = len(self._buffer) - len(self._buffer.lstrip())
            if start < len(self._buffer):
                self._may_be_bare = False
                if self._buffer[start] in "{[":
                    return self._begin_body(start)
            elif not is_last:
                return None
        found = self._buffer.find(style.mark)
        if found >= 0:
            content = self._take(len(self._buffer[:found].rstrip()))
            self._begin_body(len(self._buffer) - len(self._buffer.lstrip()) + len(style.mark))
            return content
        held = 0 if is_last else _held(self._buffer, style.mark)
        return self._take(len(self._buffer) - held) or None

    def _begin_body(self, at: int) -> list[Delta]:
        self._body_at = at
        self._scanner = _JSONScanner(at)
        self._read_next = self._read_body
        return []

    def _read_body(self, style: ToolCallStyle, is_last: bool) -> list[Delta] | None:
        """The JSON of a call; what stands before it in the buffer is kept in case it is none."""
        first = _NOT_BLANK.search(self._buffer, self._body_at)
        if first and first[0] not in "{[":
            self._read_next = self._read_text
            return self._take(self._body_at)
        end = self._scanner.find_end(self._buffer) if first else None
        if end is None:
            if not is_last:
                return None
            self._read_next = self._read_text
            return self._take(len(self._buffer))
        calls = _calls(self._buffer[self._body_at : end], style.arguments_key, self._names)
        if not calls:
            self._read_next = self._read_text
            return self._take(end)
        self._buffer = self._buffer[end:]
        self._read_next = self._read_end
        return self._told(calls)

    def _read_end(self, style: ToolCallStyle, is_last: bool) -> list[Delta] | None:
        """After a call's JSON: its end mark, if the model wrote one."""
        self._buffer = self._buffer.lstrip()
        is_part = len(self._buffer) < len(style.end) and style.end.startswith(self._buffer)
        if is_part and not is_last:
            return None
        self._buffer = self._buffer.removeprefix(style.end)
        self._read_next = self._read_gap
        return []

    def _read_gap(self, style: ToolCallStyle, is_last: bool) -> list[Delta] | None:
        """After a call: a separator and the next call's JSON, or other text."""
        self._buffer = self._buffer.lstrip()
        rest = self._buffer.removeprefix(style.separator).lstrip()
        if not rest and not is_last:
            return None
        if style.separator and self._buffer.startswith(style.separator) and rest[:1] in ("{", "["):
            return self._begin_body(len(self._buffer) - len(rest))
        self._read_next = self._read_text
        return []

    def _take(self, count: int) -> list[Delta]:
        """The first characters of the buffer, as content."""
        content, self._buffer = self._buffer[:count], self._buffer[count:]
        return [{"content": content}] if content and self._has_content else []

    def _told(self, calls: Sequence[tuple[str, str]]) -> list[Delta]:
        deltas = []
        for name, arguments in calls:
            if self._at_most_one and self.num_calls:
                break
            call = {
                "index": self.num_calls,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            deltas.append({"tool_calls": [call]})
            self.num_calls += 1
        return deltas


class _JSONScanner:
    """Finds where an object or array ends, in a text that grows."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._depth = 0
        self._is_in_string = False

    def find_end(self, text: str) -> int | None:
        """Position behind its last bracket; None while that is not there."""
        while found := (_IN_STRING if self._is_in_string else _OUTSIDE).search(text, self._at):
            self._at = found.end()
            if found[0] == '"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == 0:
                    return self._at
        # A backslash at the end waits for what it escapes.
        self._at = max(self._at, len(text) - text.endswith("\\"))
        return None


def _held(text: str, mark: str) -> int:
    """Characters at the end of a text that may belong to a call: blanks, part of its mark."""
    num_of_mark = next(
        (size for size in range(min(len(mark), len(text)), 0, -1) if mark.startswith(text[-size:])),
        0,
    )
    before = text[: len(text) - num_of_mark]
    return len(text) - len(before.rstrip())


def _calls(text: str, arguments_key: str, names: frozenset[str]) -> list[tuple[str, str]] | None:
    """Name and arguments of each call in a JSON text; None if it is anything else."""
    try:
        value = json.loads(text)
        calls = value if isinstance(value, list) else [value]
        return [_call(call, arguments_key, names) for call in calls]
    except (ValueError, TypeError, RecursionError):
        return None


def _call(call: Any, arguments_key: str, names: frozenset[str]) -> tuple[str, str]:
    if not isinstance(call, dict) or call.get("name") not in names:
        raise ValueError("no call of a known function")
    other_key = "parameters" if arguments_key == "arguments" else "arguments"
    arguments = call.get(arguments_key, call.get(other_key, {}))
    if isinstance(arguments, str):  # some models write JSON in JSON
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    # NaN and Infinity, which Python would read and write, are no JSON.
    return call["name"], json.dumps(arguments, allow_nan=False)
