"""`tightkv serve MODEL`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import difflib
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tightkv.cli.options import SERVER_PART, add_flags, given_options
from tightkv.config import PARTS, REFUSED_OPTIONS, EngineConfig, ServerConfig
from tightkv.errors import ConfigError
from tightkv.server import run_server

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command to the parser's sub-commands."""
    parser = commands.add_parser(
        "serve",
        help="serve a model behind an OpenAI-compatible API",
        description="Serves a model behind an OpenAI-compatible API, with metrics at /metrics and "
        "a page at /. Flags have vLLM's names.",
    )
    add_flags(parser, (SERVER_PART, *PARTS))
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of flags, without their dashes in front; flags given here win",
    )
    parser.set_defaults(run=partial(_run, parser))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if "config" in arguments:
        flags = _flags_of_file(arguments.config)
        try:
            from_file = parser.parse_args(flags)
        except ConfigError as error:
            raise ConfigError(f"{arguments.config}: {error}") from error
        arguments = argparse.Namespace(**vars(from_file) | vars(arguments))
    return run_server(
        EngineConfig.from_options(given_options(arguments)),
        ServerConfig(**given_options(arguments, (SERVER_PART,))),
    )


def _flags_of_file(path: Path) -> list[str]:
    """A YAML file as command-line arguments.

    Raises:
        ConfigError: if it cannot be read, or has a key that is no flag.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no YAML file ({reason}): correct it.") from error
    if document is None:
        return []
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must be a mapping of flags to values: write `port: 8000`.")
    flags: list[str] = []
    for key, value in document.items():
        flags += _as_flag(path, str(key).replace("_", "-"), value)
    return flags


def _as_flag(path: Path, name: str, value: Any) -> list[str]:
    parts: tuple[type[Any], ...] = (ServerConfig, *PARTS.values())
    options = {
        option.name.replace("_", "-"): option
        for part in parts
        for option in fields(part)
        if not option.metadata.get("python_only")
    }
    if name not in options and name.replace("-", "_") not in REFUSED_OPTIONS:
        near = difflib.get_close_matches(name, options, n=1)
        hint = f"did you mean {near[0]}?" if near else "`tightkv serve --help` shows all."
        raise ConfigError(f"{path}: there is no flag {name!r}: {hint}")
    if value is None:
        raise ConfigError(f"{path}: {name} has no value: give one, or leave it out.")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) else [value]
    if not values:
        return []
    if len(values) > 1 and name in options and "item" not in options[name].metadata:
        raise ConfigError(f"{path}: {name} has {len(values)} values: give one.")
    # With an equals sign a value may begin with a dash.
    return [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *map(str, values)]
