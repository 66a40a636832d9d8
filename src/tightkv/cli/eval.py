"""`tightkv eval MODEL`: what KV cache precisions cost on the user's own text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from tightkv.calibration import read_documents
from tightkv.cli.options import EVALUATION_PART, add_flags, given_options
from tightkv.cli.parser import add_formats_flag
from tightkv.cli.progress import progress_bars
from tightkv.config import ModelConfig
from tightkv.evaluation import EvaluationReport, evaluate
from tightkv.evaluation.render.terminal import LEAST_WIDTH, print_report
from tightkv.files import check_folder

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command to the parser's sub-commands."""
    parser = commands.add_parser(
        "eval",
        help="measure what KV cache precisions cost on your own text",
        description="Compares caches of other precisions with the baseline's, through the paged "
        "cache that serves: distributions of the next token, answers, retrieval, tasks. Exit "
        "status 0 only if no precision is unsafe. An interrupted run goes on when it is called "
        "again.",
    )
    add_flags(parser, parts=("model", EVALUATION_PART))
    add_formats_flag(
        parser,
        ("int8",),
        "what is measured; @FILE behind one names its scales file (auto@FILE: as the file says), "
        "int8/fp8_e4m3 is K and V apart",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        metavar="FILE",
        help="text files, JSON lines (text, prompt or messages), or data sets of the hub; "
        "default: technical prose that comes with Python",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("kv_cache_eval"),
        metavar="FOLDER",
        help="for report.json, report.md and report.html (default: kv_cache_eval)",
    )
    parser.add_argument("--details", action="store_true", help="also print all figures of fidelity")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the reports, show the table; 1 if a precision is unsafe."""
    folder = check_folder(arguments.output_dir)
    documents = None if arguments.data is None else read_documents(arguments.data)
    options = given_options(arguments, parts=(EVALUATION_PART,))
    with progress_bars() as progress:
        report = evaluate(
            ModelConfig(**given_options(arguments, parts=("model",))),
            arguments.kv_cache_dtype,
            documents,
            options.pop("tasks", ()),
            output_dir=folder,
            sources=[Path(name).name for name in arguments.data or ()],
            progress=progress,
            **options,
        )
    _print(report, folder, details=arguments.details)
    return 0 if report.passed else 1


def _print(report: EvaluationReport, folder: Path, *, details: bool) -> None:
    # Narrower, the table would lose its names; a terminal wraps the lines.
    console = Console(width=max(Console().width, LEAST_WIDTH))
    print_report(report, console, details=details)
    console.print(
        f"{folder / 'report.html'}, report.md and report.json have all figures.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
