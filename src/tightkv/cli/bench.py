"""`tightkv bench WHAT MODEL`: throughput, latency, KV cache precisions side by side, a server."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from tightkv.benchmark import (
    LatencySweep,
    bench_kv,
    bench_latency,
    bench_throughput,
    parse_numbers,
)
from tightkv.benchmark.plots import plot_kv, plot_latency, plot_throughput
from tightkv.benchmark.tables import kv_table, latency_table, throughput_table
from tightkv.cli.bench_flags import (
    add_data_flags,
    add_output_flags,
    add_percentiles,
    check_figures,
    check_outputs,
    data_config,
    finish,
)
from tightkv.cli.bench_serve import add_serve_parser
from tightkv.cli.options import add_flags, given_options
from tightkv.cli.parser import add_formats_flag
from tightkv.cli.progress import progress_bars
from tightkv.errors import ConfigError

__all__ = ["add_parser"]

_PRECISIONS = (
    "cache precisions; @FILE behind one names its scales file, int8/fp8_e4m3 is K and V apart"
)


def add_parser(commands: Any) -> None:
    """Add the command, and its own sub-commands, to the parser's sub-commands."""
    parser = commands.add_parser(
        "bench",
        help="measure speed: throughput, latency, KV cache precisions side by side, a server",
        description="Measures how fast a model is served, with the flags and figures of `vllm "
        "bench` and of llama-bench.",
    )
    parser.set_defaults(run=_say_what)
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT")
    _add_throughput(kinds)
    _add_latency(kinds)
    add_serve_parser(kinds)
    _add_kv(kinds)


def _say_what(arguments: argparse.Namespace) -> int:
    raise ConfigError("Say what to measure: tightkv bench throughput, latency, serve or kv.")


def _add_throughput(kinds: Any) -> None:
    parser = kinds.add_parser(
        "throughput",
        help="tokens per second of many requests at once",
        description="Answers many requests that are all there at once, in an engine of this "
        "process, and tells the rates.",
        conflict_handler="resolve",
    )
    _add_engine_flags(parser, ("auto",))
    add_data_flags(parser)
    add_percentiles(parser.add_argument_group("figures"), "50,99")
    add_output_flags(parser, repetitions=1)
    parser.set_defaults(run=_throughput)


def _add_latency(kinds: Any) -> None:
    parser = kinds.add_parser(
        "latency",
        help="time of one batch: prefill and decode apart, at several depths",
        description="Times one batch of equal requests: its prompts and its answers apart. Lists "
        "with commas are combined, as in llama-bench.",
        conflict_handler="resolve",
    )
    _add_engine_flags(parser, ("auto",))
    batch = parser.add_argument_group("batch")
    lists = {
        "--batch-size": ("8", "sequences"),
        "--input-len": ("32", "tokens of each prompt"),
        "--output-len": ("128", "tokens of each answer"),
        "--depth": ("0", "tokens in the cache before the prompt"),
    }
    for flag, (default, text) in lists.items():
        batch.add_argument(
            flag, default=default, metavar="LIST", help=f"{text} (default: {default})"
        )
    batch.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts")
    add_output_flags(parser, repetitions=5)
    parser.set_defaults(run=_latency)


def _add_kv(kinds: Any) -> None:
    parser = kinds.add_parser(
        "kv",
        help="KV cache precisions side by side at one budget of memory",
        description="Gives each KV cache precision the same memory and the same requests, each in "
        "a process of its own, and shows what it holds, how fast it is, and what `tightkv plan` "
        "says. The first precision is what the others are compared with.",
        conflict_handler="resolve",
    )
    _add_engine_flags(parser, ("float16", "int8"))
    load = parser.add_argument_group("requests")
    load.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help="requests, all there at once; default: twice as many as the roomiest precision holds",
    )
    load.add_argument("--input-len", type=int, default=128, metavar="N", help="(default: 128)")
    load.add_argument("--output-len", type=int, default=1024, metavar="N", help="(default: 1024)")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts")
    load.add_argument(
        "--no-slope", action="store_true", help="do not time decode steps at several contexts"
    )
    add_percentiles(load, "50,90,99")
    add_output_flags(parser, repetitions=None)
    parser.set_defaults(run=_kv)


def _add_engine_flags(parser: argparse.ArgumentParser, precisions: tuple[str, ...]) -> None:
    add_flags(parser)
    add_formats_flag(parser, precisions, _PRECISIONS)
    for flag in ("--k-cache-dtype", "--v-cache-dtype", "--quantization-config-path"):
        parser.add_argument(
            flag, action=_InPrecision, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


class _InPrecision(argparse.Action):
    """What is a part of a precision's name here."""

    def __call__(
        self, parser: object, namespace: object, values: object, option: Any = None
    ) -> None:
        raise ConfigError(
            f"{option} is not taken here: write it into --kv-cache-dtype, as int8/fp8_e4m3 (K and "
            "V apart) or int8@scales.json."
        )


def _throughput(arguments: argparse.Namespace) -> int:
    percentiles = check_figures(arguments)
    data = data_config(arguments, None)
    with progress_bars() as progress:
        report = bench_throughput(
            **_engine_options(arguments),
            data=data,
            repetitions=arguments.repetitions,
            percentiles=percentiles,
            progress=progress,
        )
    finish(arguments, throughput_table(report), report.as_json(), partial(plot_throughput, report))
    return 0


def _latency(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    sweep = LatencySweep(
        batch_sizes=parse_numbers("--batch-size", arguments.batch_size),
        input_lens=parse_numbers("--input-len", arguments.input_len),
        output_lens=parse_numbers("--output-len", arguments.output_len),
        depths=parse_numbers("--depth", arguments.depth, least=0),
        repetitions=arguments.repetitions,
        seed=arguments.seed,
    )
    with progress_bars() as progress:
        report = bench_latency(**_engine_options(arguments), sweep=sweep, progress=progress)
    finish(arguments, latency_table(report), report.as_json(), partial(plot_latency, report))
    return 0


def _kv(arguments: argparse.Namespace) -> int:
    percentiles = check_figures(arguments)
    with progress_bars() as progress:
        report = bench_kv(
            **_engine_options(arguments),
            num_prompts=arguments.num_prompts,
            input_len=arguments.input_len,
            output_len=arguments.output_len,
            measure_slope=not arguments.no_slope,
            percentiles=percentiles,
            seed=arguments.seed,
            progress=progress,
        )
    finish(arguments, kv_table(report), report.as_json(), partial(plot_kv, report))
    return 0


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of a benchmark: the model, the precisions, and the engine's other options.

    The scheduler's seed is not asked for: answers are greedy, and --seed is of the prompts.
    """
    options = given_options(arguments)
    options.pop("seed", None)
    return {"kv_cache_dtypes": options.pop("kv_cache_dtype"), **options}
