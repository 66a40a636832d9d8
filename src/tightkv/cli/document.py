"""Writes docs/cli.md from the parsers: `python -m tightkv.cli.document docs/cli.md`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tightkv.cli.main import make_parser
from tightkv.config import REFUSED_OPTIONS

__all__ = ["page"]

_HEAD = """\
# The command line

Made by `make docs` from `config.py` and `cli/`. Each option of the model, the cache, the scheduler,
the device and the server is a field of a dataclass in `config.py`; those of the first four are what
`LLM(...)` takes, with underscores.
"""


def page() -> str:
    """The page, as Markdown."""
    return "\n".join([_HEAD, *_commands(make_parser()), *_refused()])


def _commands(parser: argparse.ArgumentParser, prefix: str = "tightkv") -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"## {prefix} {name}\n\n{command.description}\n"
                yield from _groups(command)
                yield from _commands(command, f"{prefix} {name}")


def _groups(command: argparse.ArgumentParser) -> Iterator[str]:
    for group in command._action_groups:
        rows = [_row(action) for action in group._group_actions if _is_shown(action)]
        if rows:
            yield f"### {(group.title or '').capitalize()}\n"
            yield "| | |\n|---|---|"
            yield "\n".join(rows) + "\n"


def _is_shown(action: argparse.Action) -> bool:
    kinds = (argparse._HelpAction, argparse._SubParsersAction)
    return action.help != argparse.SUPPRESS and not isinstance(action, kinds)


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    values = _values(action)
    return f"| {names}{' ' + values if values else ''} | {_escaped(action.help or '')} |"


def _values(action: argparse.Action) -> str:
    if not action.option_strings or action.nargs == 0:
        return ""
    if action.choices is not None:
        return _escaped(" \\| ".join(map(str, action.choices)))
    more = " …" if action.nargs == "+" else ""
    return f"{action.metavar or action.dest.upper()}{more}"


def _escaped(text: str) -> str:
    return text.replace("%%", "%").replace("<", "&lt;")


def _refused() -> Iterator[str]:
    yield "## Flags of other engines that are refused\n\n| | |\n|---|---|"
    for name, reason in sorted(REFUSED_OPTIONS.items()):
        yield f"| `--{name.replace('_', '-')}` | {_escaped(reason)} |"
    yield ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
