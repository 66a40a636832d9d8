"""`tightkv bench serve MODEL`: a load for any OpenAI server."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tightkv.benchmark import (
    CHAT,
    COMPLETIONS,
    METRICS,
    LoadConfig,
    ServedModel,
    ServeReport,
    Target,
    bench_serve,
    find_model,
    parse_address,
    parse_goodput,
)
from tightkv.benchmark.plots import plot_serve
from tightkv.benchmark.tables import console_block, serve_table
from tightkv.cli.bench_flags import (
    add_data_flags,
    add_output_flags,
    add_percentiles,
    check_figures,
    data_config,
    finish,
    write_json,
)
from tightkv.cli.progress import progress_bars
from tightkv.config import ModelConfig
from tightkv.errors import CheckpointError, ConfigError
from tightkv.files import check_folder
from tightkv.models.loader import load_tokenizer

__all__ = ["add_serve_parser"]

_BACKENDS = {"openai": COMPLETIONS, "vllm": COMPLETIONS, "openai-chat": CHAT}
_EXAMPLE = '{"top_k": 5}'
_SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}


def add_serve_parser(kinds: Any) -> None:
    """Add the sub-command."""
    parser = kinds.add_parser(
        "serve",
        help="a load for any OpenAI server, with vLLM's figures",
        description="Sends requests to an OpenAI server, of TightKV or any other engine, and shows "
        "what `vllm bench serve` shows, by its definitions.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="its name on the server; default: the first there"
    )
    parser.add_argument("--model", dest="model_flag", metavar="NAME", help=argparse.SUPPRESS)
    _add_server_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    add_data_flags(parser)
    _add_figure_flags(parser.add_argument_group("figures"))
    add_output_flags(parser, repetitions=1)
    parser.set_defaults(run=_run)


def _add_server_flags(server: Any) -> None:
    server.add_argument("--base-url", metavar="URL", help="default: http://HOST:PORT")
    server.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="(default: 8000)")
    server.add_argument(
        "--backend",
        choices=_BACKENDS,
        default="openai",
        help="openai and vllm: /v1/completions; openai-chat: /v1/chat/completions",
    )
    server.add_argument("--endpoint", metavar="PATH", help="default: that of --backend")
    server.add_argument("--api-key", metavar="KEY", help="also taken from OPENAI_API_KEY")
    server.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="folder, hub id or GGUF file; default: MODEL, or where the server has it from",
    )
    server.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the tokenizer"
    )
    server.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="traces are scaled so that their longest request fits; default: what the server says",
    )


def _add_load_flags(load: Any) -> None:
    load.add_argument(
        "--request-rate",
        default="inf",
        metavar="LIST",
        help="requests per second, with commas for one load after another; inf is all at once, or "
        "a trace's own times (default: inf)",
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="shape of the gaps: 1 is a Poisson process, less is in bursts, inf a fixed gap "
        "(default: 1)",
    )
    load.add_argument(
        "--max-concurrency",
        metavar="LIST",
        help="most requests on their way, with commas for one load after another; default: all",
    )
    load.add_argument(
        "--self-timed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="send the requests of a trace at its times (default: yes)",
    )
    load.add_argument(
        "--arrival-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="a trace's times are multiplied by this (default: 1)",
    )
    load.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="ask for answers exactly as long as said (default: for random data and traces)",
    )
    load.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="requests before that do not count"
    )
    load.add_argument(
        "--reset-prefix-cache",
        action="store_true",
        help="let the server forget its prefixes before each load (TightKV; vLLM in development "
        "mode)",
    )
    for name, kind in _SAMPLING.items():
        load.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=argparse.SUPPRESS,
            metavar="N" if kind is int else "X",
            help="of sampling; default: 0" if name == "temperature" else "of sampling",
        )
    load.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="more of each request"
    )


def _add_figure_flags(figures: Any) -> None:
    figures.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="LIST",
        help=f"what is shown, of {','.join(METRICS)} (default: ttft,tpot,itl)",
    )
    add_percentiles(figures, "99")
    figures.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="goals of a request, as ttft:200 tpot:50; also counts requests that meet all",
    )
    figures.add_argument(
        "--save-result", action="store_true", help="write a file per load, with vLLM's keys"
    )
    figures.add_argument(
        "--save-detailed", action="store_true", help="with the times of every request"
    )
    figures.add_argument("--result-dir", type=Path, default=Path(), metavar="FOLDER")
    figures.add_argument("--result-filename", metavar="NAME", help="of the file, or of the first")


def _run(arguments: argparse.Namespace) -> int:
    percentiles = check_figures(arguments)
    data_config(arguments, arguments.max_model_len)
    loads = _loads(arguments)
    for load in loads:
        load.check()
    if arguments.num_warmups < 0:
        raise ConfigError(f"--num-warmups is {arguments.num_warmups}: give a number from 0 on.")
    metrics = _metrics(arguments.percentile_metrics)
    goodput = parse_goodput(arguments.goodput)
    folder = check_folder(arguments.result_dir) if arguments.save_result else None
    target, tokenizer, longest = _target(arguments)
    with progress_bars() as progress:
        report = bench_serve(
            target,
            data_config(arguments, longest),
            loads,
            tokenizer,
            repetitions=arguments.repetitions,
            num_warmups=arguments.num_warmups,
            reset_prefix_cache=arguments.reset_prefix_cache,
            percentiles=percentiles,
            goodput=goodput,
            progress=progress,
        )
    if folder is not None:
        _save(report, folder, arguments)
    _show(report, arguments, metrics)
    return 1 if any(run.figures.failed for run in report.runs) else 0


def _show(report: ServeReport, arguments: argparse.Namespace, metrics: tuple[str, ...]) -> None:
    table = serve_table(report)
    if arguments.output == "table":
        for run in report.runs:
            print(console_block(run, metrics=metrics))
        for note in report.notes:
            print(note)
    document = {"benchmark": "serve", "rows": [report.as_json(run) for run in report.runs]}
    draw = partial(plot_serve, report)
    finish(arguments, table, document, draw, has_table=len(report.runs) > 1)


def _loads(arguments: argparse.Namespace) -> list[LoadConfig]:
    """Every combination of the lists."""
    rates = _numbers("--request-rate", arguments.request_rate)
    limits: list[int | None] = [None]
    if arguments.max_concurrency is not None:
        limits = [int(each) for each in _numbers("--max-concurrency", arguments.max_concurrency)]
    load = LoadConfig(
        burstiness=arguments.burstiness,
        self_timed=arguments.self_timed,
        arrival_scale=arguments.arrival_scale,
    )
    return [
        replace(load, request_rate=rate, max_concurrency=limit)
        for rate in rates
        for limit in limits
    ]


def _numbers(flag: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if any(not number > 0 for number in numbers):
        raise ConfigError(f"{flag} is {text!r}: give numbers above 0, with commas between.")
    if flag == "--max-concurrency" and any(number % 1 for number in numbers):
        raise ConfigError(f"{flag} is {text!r}: give whole numbers, with commas between.")
    return numbers


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics has {name!r}: choose of {', '.join(METRICS)}.")
    return names


def _target(
    arguments: argparse.Namespace,
) -> tuple[Target, PreTrainedTokenizerBase, int | None]:
    """The server, the tokenizer, and the longest request."""
    address = parse_address(arguments.base_url or f"http://{arguments.host}:{arguments.port}")
    key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # vLLM's users give the address with or without the routes' common beginning.
    address = replace(address, path=address.path.removesuffix("/v1"))
    served = find_model(address, arguments.model or arguments.model_flag, headers)
    tokenizer = _tokenizer(arguments, served)
    ignore_eos = arguments.ignore_eos
    if ignore_eos is None:
        ignore_eos = arguments.dataset_name not in ("sharegpt", "custom")
    target = Target(
        address=address,
        model=served.name,
        endpoint=arguments.endpoint or _BACKENDS[arguments.backend],
        headers=headers,
        body=_body(arguments),
        ignore_eos=ignore_eos,
    )
    return target, tokenizer, arguments.max_model_len or served.max_model_len


def _tokenizer(arguments: argparse.Namespace, served: ServedModel) -> PreTrainedTokenizerBase:
    source = arguments.tokenizer or served.root or served.name
    try:
        return load_tokenizer(
            ModelConfig(model=source, trust_remote_code=arguments.trust_remote_code)
        )
    except CheckpointError as error:
        if arguments.tokenizer is not None:
            raise
        raise ConfigError(
            f"The tokenizer that cuts prompts to their lengths is not where the server has its "
            f"model from ({source}): name its folder, hub id or GGUF file with --tokenizer."
        ) from error


def _body(arguments: argparse.Namespace) -> Mapping[str, Any]:
    given = vars(arguments)
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    return {"temperature": 0.0, **sampling, **arguments.extra_body}


def _save(report: ServeReport, folder: Path, arguments: argparse.Namespace) -> None:
    for number, run in enumerate(report.runs):
        document = report.as_json(run, detailed=arguments.save_detailed)
        limit = run.load.max_concurrency
        name = arguments.result_filename if not number else None
        if name is None:
            parts = [document["backend"], f"{run.load.request_rate:g}qps"]
            parts += [f"concurrency{limit}"] if limit is not None else []
            parts += [Path(report.target.model).name, document["date"]]
            parts += [str(number)] if number else []
            name = "-".join(parts) + ".json"
        write_json(folder / name, document)


def _json_object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no JSON ({error.msg}): give an object, as {_EXAMPLE}"
        ) from error
    if not isinstance(document, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: give one, as {_EXAMPLE}")
    return document
