"""Command-line flags, made from the fields of the configuration."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

from tightkv.config import PARTS, REFUSED_OPTIONS, EvaluationConfig, ServerConfig
from tightkv.errors import ConfigError

__all__ = ["EVALUATION_PART", "SERVER_PART", "add_flags", "given_options", "parse_bytes"]

EVALUATION_PART = "evaluation"
SERVER_PART = "server"
_PARTS = {**PARTS, EVALUATION_PART: EvaluationConfig, SERVER_PART: ServerConfig}

_UNITS = {
    "": 1,
    **{unit: 10**power for unit, power in zip("KMGT", (3, 6, 9, 12), strict=True)},
    **{f"{unit}I": 2**power for unit, power in zip("KMGT", (10, 20, 30, 40), strict=True)},
}


def add_flags(parser: argparse.ArgumentParser, parts: Collection[str] = tuple(PARTS)) -> None:
    """Add a flag for each field of parts of the configuration, and the model as an argument."""
    for name in parts:
        part = _PARTS[name]
        group = parser.add_argument_group(f"{name} options")
        types = get_type_hints(part)
        for option in fields(part):
            if option.metadata.get("positional"):
                _add_positional(parser, option)
            elif not option.metadata.get("python_only"):
                _add_flag(group, option, types[option.name])
    for name, reason in REFUSED_OPTIONS.items():
        parser.add_argument(
            _flag(name), nargs="*", dest=name, action=_Refuse, const=reason, help=argparse.SUPPRESS
        )


def given_options(
    arguments: argparse.Namespace, parts: Collection[str] = tuple(PARTS)
) -> dict[str, Any]:
    """The flags of these parts that were given, by the names of their fields.

    Raises:
        ConfigError: if the model is missing.
    """
    given: Mapping[str, Any] = vars(arguments)
    options = [option for part in parts for option in fields(_PARTS[part])]
    for option in options:
        if option.metadata.get("positional") and option.name not in given:
            raise ConfigError(
                f"{option.name.upper()} is missing: give it in front of the flags, a "
                f"{option.metadata['help']}."
            )
    return {option.name: given[option.name] for option in options if option.name in given}


def parse_bytes(text: str) -> int:
    """Bytes of a size, as `512M` (10^6), `2GiB` (2^30), or without a unit.

    Raises:
        argparse.ArgumentTypeError: names what is wrong.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: give bytes, or a number with K, M, G, KiB, MiB or GiB"
        )
    return int(float(match[1]) * _UNITS[match[2]])


class _Refuse(argparse.Action):
    """A flag that other engines have: one sentence instead of "unrecognized arguments"."""

    def __call__(
        self, parser: object, namespace: object, values: object, option: Any = None
    ) -> None:
        raise ConfigError(f"{option} is refused: {self.const}")


class _StoreOnce(argparse.Action):
    """For a value that can be given in two ways: not two values."""

    def __call__(
        self, parser: object, namespace: object, value: Any, option: str | None = None
    ) -> None:
        if getattr(namespace, self.dest, value) != value:
            raise ConfigError(
                f"{self.dest.upper()} is given twice, as {getattr(namespace, self.dest)!r} and "
                f"{value!r}: leave one out."
            )
        setattr(namespace, self.dest, value)


def _add_positional(parser: argparse.ArgumentParser, option: Field[Any]) -> None:
    """An argument that may also be given as a flag, which is how vLLM's server takes it."""
    settings: dict[str, Any] = {
        "action": _StoreOnce,
        "default": argparse.SUPPRESS,
        "metavar": option.name.upper(),
        "help": option.metadata["help"],
    }
    parser.add_argument(option.name, nargs="?", **settings)
    parser.add_argument(
        _flag(option.name), dest=option.name, **settings | {"help": argparse.SUPPRESS}
    )


def _add_flag(group: Any, option: Field[Any], kind: Any) -> None:
    # Absent flags leave no trace, so that defaults stay in one place.
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(option)}
    if kind is bool:
        settings["action"] = argparse.BooleanOptionalAction
    elif "item" in option.metadata:
        metavar = option.metadata.get("metavar", "NAME")
        settings |= {"nargs": "+", "type": option.metadata["item"], "metavar": metavar}
    else:
        settings["type"] = parse_bytes if option.metadata.get("bytes") else _scalar(kind)
        settings["choices"] = option.metadata.get("choices")
        if settings["choices"] is None:
            settings["metavar"] = "BYTES" if option.metadata.get("bytes") else _metavar(kind)
    group.add_argument(_flag(option.name), dest=option.name, **settings)


def _help(option: Field[Any]) -> str:
    text = str(option.metadata["help"])
    if option.default in (None, (), MISSING) or option.default is True or option.default is False:
        return text
    return f"{text} (default: {option.default})"


def _scalar(kind: Any) -> type:
    return next(scalar for scalar in (int, float, str) if scalar in (kind, *_members(kind)))


def _members(kind: Any) -> tuple[Any, ...]:
    members: tuple[Any, ...] = getattr(kind, "__args__", ())
    return members


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X", str: "NAME"}[_scalar(kind)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
