"""TightKV against llama.cpp, vLLM and transformers on this CPU, all numbers measured in one run.

    LLAMA_CPP_PYTHON=…/bin/python VLLM_PYTHON=…/bin/python make bench-cpu ARGS="--only slope,batch"

A peer is an interpreter in whose environment it is installed (llama-cpp-python; vLLM built for the
CPU); without it, our figures stand alone. All engines run the same model in float32 on the same
token ids: TightKV converts the GGUF file once for itself, vLLM and transformers, and llama.cpp once
for itself. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.serving.engines import Engine, EngineFailure
from benchmarks.serving.machine import describe_machine
from benchmarks.serving.peers import (
    add_engine_options,
    common_environment,
    prepare,
    vllm_environment,
)
from benchmarks.serving.report import Row, as_json, table, write_atomically
from benchmarks.serving.works import FULL, QUICK, WORKS, Bench, Engines


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description="TightKV against other engines on this CPU."
    )
    add_engine_options(parser)
    parser.add_argument("--quick", action="store_true", help="small sizes and one round")
    parser.add_argument("--only", type=_works, default=list(WORKS), help=f"of {','.join(WORKS)}")
    parser.add_argument("--rounds", type=int, help="default 3; 1 with --quick")
    parser.add_argument("--output", type=Path, help="file that also gets the JSON object")
    return parser.parse_args()


def _works(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in WORKS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown work {unknown[0]!r}; choose of {','.join(WORKS)}"
        )
    return names


def make_bench(options: argparse.Namespace, folder: Path) -> Bench:
    """Prepare the model, and name the engines."""
    prepared, common = prepare(options), common_environment(options)
    converted = str(prepared.folder)
    return Bench(
        engines=Engines(
            tightkv=Engine("TightKV", "tightkv_driver", model=converted, environment=common),
            kernel=Engine("TightKV", "kernel_driver", environment=common),
            llama_cpp=Engine(
                "llama.cpp",
                "llama_cpp_driver",
                options.llama_cpp_python,
                "LLAMA_CPP_PYTHON",
                str(prepared.gguf),
                common,
            ),
            vllm=Engine(
                "vLLM",
                "vllm_driver",
                options.vllm_python,
                "VLLM_PYTHON",
                converted,
                vllm_environment(options),
            ),
            transformers=Engine(
                "transformers", "transformers_driver", model=converted, environment=common
            ),
        ),
        sizes=QUICK if options.quick else FULL,
        rounds=options.rounds or (1 if options.quick else 3),
        threads=options.threads,
        token_ids=prepared.token_ids,
        folder=folder,
    )


def summary(options: argparse.Namespace, bench: Bench, rows: list[Row]) -> dict[str, Any]:
    return {
        "benchmark": "cpu",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": {"python": sys.version.split()[0], **bench.versions},
        "threads": bench.threads,
        "rounds": bench.rounds,
        "quick": options.quick,
        "works": options.only,
        "rows": [as_json(row) for row in rows],
        "notes": bench.notes,
        "failures": bench.failures,
        "figures": bench.figures,
    }


def main() -> int:
    options = parse_options()
    # As an exception, so that the engine at work is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        try:
            bench = make_bench(options, Path(folder))
        except EngineFailure as failure:
            print(f"error: TightKV cannot prepare the model: it {failure}", file=sys.stderr)
            return 1
        rows = [row for name in options.only for row in WORKS[name](bench)]
    console = Console(width=132)
    title = f"{bench.threads} threads, float32 weights"
    console.print(table(rows, f"{title}; sizes too small for the bars" if options.quick else title))
    for note in [*bench.notes, *(f"FAILED {failure}" for failure in bench.failures)]:
        console.print(note, markup=False, highlight=False)
    line = json.dumps(summary(options, bench, rows), ensure_ascii=False)
    if options.output:
        write_atomically(options.output, line + "\n")
    print(line)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
