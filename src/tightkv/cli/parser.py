"""The parser of all commands: what is wrong with a flag is one sentence, not a page of usage."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

from tightkv.errors import ConfigError

__all__ = ["OneSentenceParser", "add_formats_flag"]

_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}
# What argparse says, and what we say.
_WORDS = {
    "expected one argument": "has no value: give one",
    "expected at least one argument": "has no value: give one or more",
}
_IGNORED = "ignored explicit argument "


class OneSentenceParser(argparse.ArgumentParser):
    """Answers a wrong flag with a ConfigError; its subcommands' parsers do, too."""

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError of one sentence, which ends with where the flags are listed."""
        raise ConfigError(f"{_in_our_words(message)}; see `{self.prog} --help`.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but nothing is unknown afterwards."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"Unknown argument {unknown[0]!r}: leave it out")
        return parsed, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        convert: Any = self._registry_get("type", action.type, action.type)
        try:
            return convert(arg_string)
        except (ConfigError, argparse.ArgumentTypeError) as error:
            self.error(f"{_name(action)}: {error}")
        except (TypeError, ValueError):
            self.error(
                f"{_name(action)} is {arg_string!r}: give {_KINDS.get(action.type, 'another')}"
            )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = ", ".join(map(str, action.choices))
            self.error(f"{_name(action)} is {value!r}: choose one of {choices}")


def add_formats_flag(parser: Any, formats: Iterable[str], help: str, **settings: Any) -> None:
    """Add `--kv-cache-dtype` for a command that takes several, as `parse_arms` reads them."""
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        metavar="FORMAT",
        help=f"{help}; with blanks or commas between (default: {' '.join(formats)})",
        **{"default": tuple(formats), **settings},
    )


def _name(action: argparse.Action) -> str:
    return max(action.option_strings, key=len, default=str(action.metavar or action.dest))


def _in_our_words(message: str) -> str:
    message = message.removesuffix(".")
    missing = "the following arguments are required: "
    if message.startswith(missing):
        names = message.removeprefix(missing)
        return f"{names} is missing: give it, in front of the flags"
    if not message.startswith("argument "):
        return message[0].upper() + message[1:]
    flag, _, problem = message.removeprefix("argument ").partition(": ")
    if problem.startswith(_IGNORED):
        return (
            f"{flag} takes no value, and {problem.removeprefix(_IGNORED)} was given: leave it out"
        )
    return f"{flag} {_WORDS[problem]}" if problem in _WORDS else f"{flag}: {problem}"
