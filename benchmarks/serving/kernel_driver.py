"""The decode attention kernel of TightKV by format, and what the machine can do at most."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import tightkv
from benchmarks.kernels.decode_attention import SHAPES, time_arms
from benchmarks.serving import driver
from tightkv.kernels import select_backend

ARMS = (
    "float16",
    "int8 per channel",
    "int8 per tensor",
    "int8_per_token_head",
    "fp8_e4m3 per tensor",
)
MATRIX_SIZE = 2048
SUM_BYTES = 2**29
PEAK_TRIES = 10


def kernel(options: argparse.Namespace) -> driver.Result:
    """Seconds of one call, by shape and format, over `lengths[0]` cached tokens."""
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    backend = select_backend(torch.device("cpu"))
    (tokens,) = options.lengths
    results = []
    for shape in SHAPES:
        driver.progress(f"{options.threads} thread(s), shape {shape}")
        seconds = time_arms(ARMS, shape, tokens, backend, options.repeats)
        results.append({"shape": shape, "seconds": seconds})
    return {"kernel": backend.name, "tokens": tokens, "results": results}


def peaks(options: argparse.Namespace) -> driver.Result:
    """Arithmetic and memory bandwidth, the best of some tries: limits, not what is usual."""
    torch.set_num_threads(options.threads)
    matrix = torch.randn(MATRIX_SIZE, MATRIX_SIZE)
    numbers = torch.ones(SUM_BYTES // 4)
    return {
        "gflops": 2 * MATRIX_SIZE**3 / _best_seconds(lambda: torch.mm(matrix, matrix)) / 1e9,
        "gigabytes_per_second": SUM_BYTES / _best_seconds(numbers.sum) / 1e9,
    }


def _best_seconds(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(PEAK_TRIES):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    driver.run(tightkv.__version__, {"kernel": kernel, "peaks": peaks})
