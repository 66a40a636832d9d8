"""`tightkv plan MODEL`: which KV precision fits how many requests, before anything is bought."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tightkv.capacity import DEFAULT_KV_CACHE_DTYPES, Comparison, compare, plan, read_server
from tightkv.cli.options import parse_bytes
from tightkv.cli.parser import add_formats_flag
from tightkv.planning import (
    HOSTS,
    LANGUAGES,
    CapacityPlan,
    Message,
    Section,
    Texts,
    as_markdown,
    format_bytes,
    known_hardware,
    parse_length,
    report,
)

__all__ = ["add_parser"]

_DOES_NOT_FIT = 1
_PLAN_OPTIONS = (
    "hardware",
    "num_gpus",
    "tensor_parallel_size",
    "max_model_len",
    "typical_len",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_cache_dtypes",
    "kv_cache_dtype_skip_layers",
    "static",
    "concurrency",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "dtype",
    "weight_bytes",
    "revision",
)


def add_parser(commands: Any) -> None:
    """Add the command to the parser's sub-commands."""
    parser = commands.add_parser(
        "plan",
        help="which KV precision fits how many requests on which hardware; needs no weights",
        description="Plans memory and requests for each KV cache format from a config alone: no "
        "weights, no GPU. Exit status 0: it fits, 1: it does not, 2: wrong input.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder with a config.json, that file, a GGUF file, or a hub id",
    )
    _add_hardware(parser.add_argument_group("hardware"))
    _add_load(parser.add_argument_group("requests"))
    _add_cache(parser.add_argument_group("KV cache"))
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--output", choices=("table", "md", "json"), default="table")
    output.add_argument("--lang", choices=LANGUAGES, default="en", help="language (default: en)")
    output.add_argument(
        "--compare",
        metavar="URL",
        help="also show what the server at this address says of itself, beside the plan",
    )
    parser.set_defaults(run=run)


def _add_hardware(group: Any) -> None:
    names = ", ".join((*known_hardware(), *HOSTS))
    _option(
        group,
        "--hardware",
        metavar="NAME",
        help=f"{names}, or custom:96GiB[,bandwidth=3.35TB/s,flops=989TFLOPS,fp8=yes]; cpu is all "
        "of this machine's memory, host what is free (default: host)",
    )
    _option(group, "--num-gpus", type=int, metavar="N", help="devices in all (default: 1)")
    _option(
        group,
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="devices that share one model (default: --num-gpus)",
    )
    _option(
        group,
        "--gpu-memory-utilization",
        type=float,
        metavar="X",
        help="share of the device's memory that may be used (default: 0.9)",
    )


def _add_load(group: Any) -> None:
    _option(
        group,
        "--max-model-len",
        type=parse_length,
        metavar="N",
        help="longest request, as 16384 or 16k (default: what the model knows)",
    )
    _option(
        group,
        "--typical-len",
        type=parse_length,
        metavar="N",
        help="an ordinary one (default: 1200)",
    )
    _option(
        group,
        "--concurrency",
        type=int,
        metavar="N",
        help="requests of --max-model-len that must fit at once; also shows the memory they need",
    )
    _option(group, "--max-num-seqs", type=int, metavar="N", help="most requests in one step")
    _option(
        group, "--max-num-batched-tokens", type=int, metavar="N", help="most tokens in one step"
    )


def _add_cache(group: Any) -> None:
    add_formats_flag(
        group,
        DEFAULT_KV_CACHE_DTYPES,
        "formats to compare: names, K and V apart as int8/fp8, auto@FILE as a scales file of "
        "`tightkv calibrate` says",
        dest="kv_cache_dtypes",
        default=argparse.SUPPRESS,
    )
    _option(
        group,
        "--kv-cache-dtype-skip-layers",
        nargs="+",
        metavar="LAYER",
        help="layers kept in the model's data type: indices, ranges as 0-7, or sliding_window",
    )
    _option(
        group,
        "--static",
        action="store_true",
        help="static scales alone: 8.0 bits per value, as vLLM's fp8",
    )
    _option(
        group,
        "--kv-cache-memory-bytes",
        type=parse_bytes,
        metavar="BYTES",
        help="the pool's size, as 2GiB, instead of what is left",
    )
    _option(group, "--block-size", type=int, metavar="N", help="tokens per block (default: 16)")
    _option(
        group,
        "--dtype",
        metavar="NAME",
        help="of weights and intermediate results: auto, float32, float16, bfloat16",
    )
    _option(
        group,
        "--weight-bytes",
        type=parse_bytes,
        metavar="BYTES",
        help="of all weights, as 38GB, where config and files do not tell",
    )
    _option(group, "--revision", metavar="NAME", help="branch, tag or commit of a hub id")


def run(arguments: argparse.Namespace) -> int:
    """Plan, and print the plan."""
    given = vars(arguments)
    options = {name: given[name] for name in _PLAN_OPTIONS if name in given}
    texts = Texts(arguments.lang)
    if arguments.compare is None:
        planned, comparison = plan(arguments.model, **options), None
    else:
        server = read_server(arguments.compare)
        planned = plan(arguments.model, **{**server.options, **options})
        comparison = compare(planned, server, arguments.compare)
    _show(planned, comparison, texts, arguments.output)
    return 0 if planned.fits else _DOES_NOT_FIT


def _show(planned: CapacityPlan, comparison: Comparison | None, texts: Texts, output: str) -> None:
    if output == "json":
        content = _with_texts(planned.to_json(), planned, texts)
        if comparison is not None:
            content["comparison"] = comparison.to_json()
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return
    sections = report(planned, texts)
    if comparison is not None:
        sections += (_comparison(comparison, planned, texts),)
    if output == "md":
        print(as_markdown(sections))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    for section in sections:
        _print(console, section)


def _print(console: Console, section: Section) -> None:
    if section.headings:
        table = Table(title=section.title, title_justify="left")
        for index, heading in enumerate(section.headings):
            is_text = index in section.text_columns
            table.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
    else:
        console.print(section.title, style="bold", markup=False, highlight=False)
    for line in section.lines:
        text = f"- {line}" if section.is_list else line
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print()


def _comparison(comparison: Comparison, planned: CapacityPlan, texts: Texts) -> Section:
    rows = tuple(
        (
            texts(row.key),
            format_bytes(row.predicted) if row.is_bytes else f"{row.predicted:,.0f}",
            format_bytes(row.actual) if row.is_bytes else f"{row.actual:,.0f}",
            f"{row.difference:+.1%}",
        )
        for row in comparison.rows
    )
    headings = tuple(texts(f"col_{name}") for name in ("what", "predicted", "actual", "difference"))
    lines = (texts("compare_host"),) if planned.hardware.is_host else ()
    return Section(texts("compared", url=comparison.url), lines, headings, rows)


def _with_texts(content: dict[str, Any], planned: CapacityPlan, texts: Texts) -> dict[str, Any]:
    """The JSON, each message with its sentence."""
    for name in ("recommendation", "notes", "not_modelled"):
        messages: Sequence[Message] = getattr(planned, name)
        for entry, message in zip(content[name], messages, strict=True):
            entry["text"] = texts.of(message)
    return content


def _option(group: Any, flag: str, **settings: Any) -> None:
    # Absent flags leave no trace, so that defaults stay in one place.
    group.add_argument(flag, default=argparse.SUPPRESS, **settings)
