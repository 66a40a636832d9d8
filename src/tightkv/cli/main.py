"""Entry point of the `tightkv` command."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from tightkv import __version__
from tightkv.cli import bench, calibrate, eval, generate, plan, serve
from tightkv.cli.parser import OneSentenceParser
from tightkv.errors import EngineError, TightKVError

__all__ = ["main", "make_parser"]

_FAILED = 1  # also a command's own "no": a request that failed, a precision that is unsafe
_BAD_INPUT = 2  # as argparse's
_INTERRUPTED = 130  # as a shell reports a process ended by Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. A wrong input is one sentence on stderr."""
    arguments_given = sys.argv[1:] if argv is None else list(argv)
    try:
        arguments = make_parser().parse_args(arguments_given)
        _log_to_stderr(arguments.quiet)
        status: int = arguments.run(arguments)
    except TightKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED if isinstance(error, EngineError) else _BAD_INPUT
    except BrokenPipeError:
        return _FAILED  # whoever read the output has gone
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = OneSentenceParser(
        prog="tightkv",
        description="LLM inference on a paged, quantized, calibrated and measured KV cache.",
    )
    parser.add_argument("--version", action="version", version=f"tightkv {__version__}")
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_parser(commands)
    generate.add_parser(commands)
    calibrate.add_parser(commands)
    eval.add_parser(commands)
    plan.add_parser(commands)
    bench.add_parser(commands)
    return parser


def _log_to_stderr(quiet: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("tightkv")
    logger.handlers = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
