"""`tightkv calibrate MODEL`: scales of the KV cache from text, in one file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tightkv.calibration import (
    GRANULARITIES,
    METHODS,
    Calibration,
    TensorReport,
    calibrate,
    read_documents,
)
from tightkv.cli.options import add_flags, given_options
from tightkv.cli.progress import progress_bars
from tightkv.config import ModelConfig
from tightkv.errors import RequestError
from tightkv.files import check_target
from tightkv.formats import KV_CACHE_DTYPES, write_scales_file

__all__ = ["add_parser"]

_SELF = "self"


def add_parser(commands: Any) -> None:
    """Add the command to the parser's sub-commands."""
    parser = commands.add_parser(
        "calibrate",
        help="make a scales file for the KV cache from text",
        description="Measures K and V on text, chooses scales by attention's error on a held-out "
        "part of it, and writes them to a file for --quantization-config-path.",
    )
    add_flags(parser, parts=("model",))
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data",
        nargs="+",
        default=[_SELF],
        metavar="FILE",
        help=".txt, .jsonl (text or messages), a hub data set, or self: text that the model "
        "writes (default)",
    )
    text.add_argument("--num-samples", type=int, metavar="N", help="windows of text (default: 64)")
    text.add_argument("--max-seq-len", type=int, metavar="N", help="tokens of one (default: 512)")
    text.add_argument("--seed", type=int, metavar="N", help="of the choice of text (default: 0)")
    scales = parser.add_argument_group("scales")
    scales.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES[1:], help="default: int8")
    scales.add_argument("--k-cache-dtype", choices=KV_CACHE_DTYPES[1:], help="of K alone")
    scales.add_argument("--v-cache-dtype", choices=KV_CACHE_DTYPES[1:], help="of V alone")
    scales.add_argument(
        "--kv-cache-dtype-skip-layers",
        nargs="+",
        metavar="LAYER",
        help="layers left as they are: indices, ranges as 0-7, sliding_window",
    )
    scales.add_argument(
        "--static",
        action="store_true",
        default=None,
        help="no dynamic scale on top: 8.0 bits per value; values beyond those seen are clipped",
    )
    scales.add_argument(
        "--granularity", choices=GRANULARITIES, help="of static scales; default: auto"
    )
    scales.add_argument("--method", choices=METHODS, help="of static scales; default: absmax")
    scales.add_argument(
        "--margin",
        type=float,
        metavar="X",
        help="static scales times this; default: the best of some",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("kv_cache_scales.json"),
        metavar="FILE",
        help="default: kv_cache_scales.json",
    )
    parser.set_defaults(run=run)


_OPTIONS = (
    "num_samples",
    "max_seq_len",
    "seed",
    "kv_cache_dtype",
    "k_cache_dtype",
    "v_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "static",
    "granularity",
    "method",
    "margin",
)


def run(arguments: argparse.Namespace) -> int:
    """Calibrate, write the file, show what was found."""
    given = vars(arguments)
    if _SELF in arguments.data and len(arguments.data) > 1:
        raise RequestError(f"--data has {_SELF} and other text: give one or the other.")
    check_target(arguments.output)
    texts = None if _SELF in arguments.data else read_documents(arguments.data)
    model = ModelConfig(**given_options(arguments, parts=("model",)))
    with progress_bars() as progress:
        result = calibrate(
            model,
            texts,
            max_model_len=model.max_model_len,
            sources=[Path(name).name for name in arguments.data],
            progress=progress,
            **{name: given[name] for name in _OPTIONS if given[name] is not None},
        )
    write_scales_file(arguments.output, result.file)
    _print(result, arguments.output)
    return 0


def _print(result: Calibration, path: Path) -> None:
    console = Console()
    console.print(_table(result))
    for remark in result.remarks:
        console.print(remark, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{path}: {result.file.made_by.method}, from {result.file.made_by.num_tokens:,} tokens; "
        f"serve with --quantization-config-path {path}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _table(result: Calibration) -> Table:
    """Range, loudest over median channel, scale, held-out clips and attention error of K and V."""
    table = Table(title="K and V by layer; clips and attention error on held-out text")
    for heading in ("layer", "", "range", "outliers", "scale", "clipped", "error"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for layer in result.layers:
        table.add_row(str(layer.layer_idx), "K", *_cells(layer.k))
        table.add_row("", "V", *_cells(layer.v))
    return table


def _cells(report: TensorReport) -> tuple[str, ...]:
    statistics, choice = report.statistics, report.choice
    seen = (f"±{float(statistics.range.max()):.3g}", f"{statistics.outlier_ratio:.1f}×")
    if choice is None:
        return (*seen, "-", "-", "-")
    error = choice.error
    return (
        *seen,
        choice.candidate.describe(),
        f"{error.clip_rate:.3%}" if error.clipped else "0",
        f"{error.relative:.1e}",
    )
