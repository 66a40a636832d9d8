"""Tool calls and content, read from a text that comes in pieces."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from typing import Any

from tightkv.server.tool_call_styles import ToolCallStyle

__all__ = ["Delta", "ToolCallReader"]

Delta = dict[str, Any]
"""The `delta` of a choice in OpenAI's streams: `{"content": ...}` or `{"tool_calls": [...]}`."""

_NOT_BLANK = re.compile(r"\S")
_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'\\.|"', re.DOTALL)
_STRING = r'"(?:[^"\\]|\\.)*"'
# A call up to its arguments' first bracket, as nearly all models write it.
_HEAD = re.compile(
    rf'\s*\{{\s*(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*"name"\s*:\s*(?P<name>{_STRING})\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)


class ToolCallReader:
    """Splits the text of one choice, as it comes, into content and calls.

    What it returns are deltas of OpenAI's streams: `{"content": ...}` or `{"tool_calls": [...]}`.
    A call that begins with the name of a function and then opens its arguments is told at once,
    and its arguments as they come, in the model's own words; if max_tokens cuts them, they stay
    cut, as in OpenAI's API. A call written in another way comes when it is whole, because only
    then it is known to be one. Blanks around calls are dropped, as are calls beyond the first
    where one is the limit. How the text was cut into pieces changes neither calls nor content.

    Attributes:
        num_calls: calls returned so far, the one that is being written included.
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
        self._is_in_list = False  # whether that JSON is one of a list
        self._is_dropped = False  # whether the last call is one too many
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
        if first and first[0] == "[" and not self._is_in_list:
            self._is_in_list = True
            return self._begin_body(first.end())
        if first and first[0] != "{":
            return self._give_up(self._body_at)
        head = _HEAD.match(self._buffer, self._body_at)
        if head and (name := _string(head["name"])) in self._names:
            self._buffer = self._buffer[head.end() :]
            self._scanner = _JSONScanner(0)
            self._read_next = self._read_arguments
            return self._tell(name, "")
        end = self._scanner.find_end(self._buffer) if first else None
        if end is None:
            return self._give_up(len(self._buffer)) if is_last else None
        call = _call(self._buffer[self._body_at : end], style.arguments_key, self._names)
        if call is None:
            return self._give_up(end)
        self._buffer = self._buffer[end:]
        self._read_next = self._read_end
        return self._tell(*call)

    def _give_up(self, count: int) -> list[Delta]:
        """What looked like a call is text up to here."""
        self._is_in_list = False
        self._read_next = self._read_text
        return self._take(count)

    def _read_arguments(self, style: ToolCallStyle, is_last: bool) -> list[Delta] | None:
        """The arguments of a call that has been told, as they come."""
        has_end = self._scanner.find_end(self._buffer) is not None
        count = len(self._buffer) if is_last and not has_end else self._scanner.at
        piece, self._buffer = self._buffer[:count], self._buffer[count:]
        if has_end:
            self._read_next = self._read_rest
            return self._go_on(piece)
        self._scanner.at = 0
        return self._go_on(piece) or None

    def _read_rest(self, style: ToolCallStyle, is_last: bool) -> list[Delta] | None:
        """After the arguments: the bracket that closes the call, and what comes before it."""
        first = _NOT_BLANK.search(self._buffer)
        if first is None:
            if not is_last:
                return None
        elif first[0] == "}":
            self._buffer = self._buffer[first.end() :]
        elif first[0] == ",":
            end = _JSONScanner(first.end(), depth=1).find_end(self._buffer)
            if end is None and not is_last:
                return None
            self._buffer = self._buffer[end:] if end else ""
        self._read_next = self._read_end
        return []

    def _read_end(self, style: ToolCallStyle, is_last: bool) -> list[Delta] | None:
        """After a call's JSON: the rest of its list, its end mark, if the model wrote one."""
        self._buffer = self._buffer.lstrip()
        if self._is_in_list:
            return self._read_list(is_last)
        is_part = len(self._buffer) < len(style.end) and style.end.startswith(self._buffer)
        if is_part and not is_last:
            return None
        self._buffer = self._buffer.removeprefix(style.end)
        self._read_next = self._read_gap
        return []

    def _read_list(self, is_last: bool) -> list[Delta] | None:
        """After a call of a list: the next one, or the list's end."""
        rest = self._buffer.removeprefix(",").lstrip()
        if not rest and not is_last:
            return None
        if self._buffer.startswith(",") and rest.startswith("{"):
            return self._begin_body(len(self._buffer) - len(rest))
        self._buffer = self._buffer.removeprefix("]")
        self._is_in_list = False
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

    def _tell(self, name: str, arguments: str) -> list[Delta]:
        """A call, and its arguments as far as they are there."""
        self._is_dropped = self._at_most_one and self.num_calls > 0
        if self._is_dropped:
            return []
        self.num_calls += 1
        call = {
            "index": self.num_calls - 1,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        return [{"tool_calls": [call]}]

    def _go_on(self, piece: str) -> list[Delta]:
        """More of the last call's arguments."""
        if not piece or self._is_dropped:
            return []
        return [{"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": piece}}]}]


class _JSONScanner:
    """Finds where an object or array ends, in a text that grows.

    Attributes:
        at: characters that need not be looked at again.
    """

    def __init__(self, at: int, depth: int = 0) -> None:
        self.at = at
        self._depth = depth
        self._is_in_string = False

    def find_end(self, text: str) -> int | None:
        """Position behind its last bracket; None while that is not there."""
        while found := (_IN_STRING if self._is_in_string else _OUTSIDE).search(text, self.at):
            self.at = found.end()
            if found[0] == '"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == 0:
                    return self.at
        # A backslash at the end waits for what it escapes.
        self.at = max(self.at, len(text) - text.endswith("\\"))
        return None


def _held(text: str, mark: str) -> int:
    """Characters at the end of a text that may belong to a call: blanks, part of its mark."""
    num_of_mark = next(
        (size for size in range(min(len(mark), len(text)), 0, -1) if mark.startswith(text[-size:])),
        0,
    )
    before = text[: len(text) - num_of_mark]
    return len(text) - len(before.rstrip())


def _string(text: str) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:
        return None


def _call(text: str, arguments_key: str, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments of the call that a JSON text is; None if it is anything else."""
    try:
        call = json.loads(text)
        if call["name"] not in names:
            return None
        other_key = "parameters" if arguments_key == "arguments" else "arguments"
        arguments = call.get(arguments_key, call.get(other_key, {}))
        if isinstance(arguments, str):  # some models write JSON in JSON
            arguments = json.loads(arguments)
        # NaN and Infinity, which Python would read and write, are no JSON.
        written = json.dumps(arguments, allow_nan=False)
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    return (call["name"], written) if isinstance(arguments, dict) else None
