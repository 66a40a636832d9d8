"""What the kinds of `tightkv bench` have in common: flags of data and output, tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tightkv.benchmark import DATASETS, DatasetConfig, parse_percentiles
from tightkv.benchmark.plots import check_plot, write_plot
from tightkv.benchmark.tables import TextTable, as_csv, as_markdown
from tightkv.errors import ConfigError
from tightkv.files import atomic_file, check_target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "add_data_flags",
    "add_output_flags",
    "add_percentiles",
    "check_figures",
    "check_outputs",
    "data_config",
    "finish",
    "write_json",
]

_FORMATS = ("table", "md", "csv", "json")
_PIPE_WIDTH = 140


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `DatasetConfig`, by vLLM's names."""
    data = parser.add_argument_group("data")
    data.add_argument("--dataset-name", choices=DATASETS, default="random", help="default: random")
    data.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="sharegpt: conversations or messages; custom: prompt, output_tokens (JSON or JSON "
        "lines); azure: CSV; mooncake: JSON lines",
    )
    data.add_argument(
        "--num-prompts", type=int, default=100, metavar="N", help="requests (default: 100)"
    )
    data.add_argument(
        "--input-len",
        "--random-input-len",
        type=int,
        metavar="N",
        help="tokens of a random prompt (default: 1024)",
    )
    data.add_argument(
        "--output-len",
        "--random-output-len",
        type=int,
        metavar="N",
        help="tokens of an answer; default: as the data says, random 128, custom 256",
    )
    data.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="random lengths differ by this share, up and down (default: 0)",
    )
    data.add_argument(
        "--random-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="tokens that random prompts begin with in common (default: 0)",
    )
    data.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn")


def data_config(arguments: argparse.Namespace, max_request_len: int | None) -> DatasetConfig:
    """The data that the flags ask for.

    Raises:
        ConfigError: for flags that contradict.
    """
    config = DatasetConfig(
        name=arguments.dataset_name,
        path=arguments.dataset_path,
        num_prompts=arguments.num_prompts,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        range_ratio=arguments.random_range_ratio,
        prefix_len=arguments.random_prefix_len,
        max_request_len=max_request_len,
        seed=arguments.seed,
    )
    config.check()
    return config


def add_percentiles(group: Any, default: str) -> None:
    group.add_argument(
        "--metric-percentiles",
        default=default,
        metavar="LIST",
        help=f"percentiles of times, with commas (default: {default})",
    )


def add_output_flags(parser: argparse.ArgumentParser, repetitions: int | None) -> None:
    """Add the flags of how often it is measured, and where figures go."""
    output = parser.add_argument_group("output")
    if repetitions is not None:
        output.add_argument(
            "-r",
            "--repetitions",
            type=int,
            default=repetitions,
            metavar="N",
            help=f"runs of each; means ± standard deviations are shown (default: {repetitions})",
        )
    output.add_argument(
        "-o", "--output", choices=_FORMATS, default="table", help="form of the table"
    )
    output.add_argument("--output-json", type=Path, metavar="FILE", help="also write all figures")
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw them: a .png file or an .html page"
    )


def check_outputs(arguments: argparse.Namespace) -> None:
    """Notice before the work what would fail after it.

    Raises:
        ConfigError: for repetitions below 1, or a plot of another kind.
        OutputError: for a file that cannot be written.
    """
    if getattr(arguments, "repetitions", 1) < 1:
        raise ConfigError(f"-r is {arguments.repetitions}: give a number from 1 on.")
    if arguments.output_json is not None:
        check_target(arguments.output_json)
    if arguments.plot is not None:
        check_plot(arguments.plot)


def check_figures(arguments: argparse.Namespace) -> tuple[float, ...]:
    """The percentiles asked for; notices what `check_outputs` does.

    Raises:
        ConfigError: also for percentiles that are none.
    """
    check_outputs(arguments)
    return parse_percentiles(arguments.metric_percentiles)


def finish(
    arguments: argparse.Namespace,
    table: TextTable,
    document: Mapping[str, Any],
    draw: Callable[[], Figure],
    *,
    has_table: bool = True,
) -> None:
    """Print the table in the form asked for, and write what `--output-json` and `--plot` name.

    Args:
        arguments: of a benchmark.
        table: of its figures.
        document: all figures; its "rows" are those of the CSV.
        draw: makes the plot.
        has_table: False leaves the table out where another form was not asked for.
    """
    if has_table or arguments.output != "table":
        _show(arguments, table, document)
    if arguments.output_json is not None:
        write_json(arguments.output_json, document)
    if arguments.plot is not None:
        write_plot(arguments.plot, draw(), table)


def _show(arguments: argparse.Namespace, table: TextTable, document: Mapping[str, Any]) -> None:
    if arguments.output == "json":
        print(json.dumps(document, indent=2, ensure_ascii=False))
    elif arguments.output == "csv":
        print(as_csv(document["rows"]))
    elif arguments.output == "md":
        print(as_markdown(table))
    else:
        _print(table)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write(json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n")


def _print(table: TextTable) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    shown = Table(title=table.title, title_justify="left")
    for number, heading in enumerate(table.headings):
        shown.add_column(heading, justify="right" if number else "left", no_wrap=not number)
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)
    for note in table.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
