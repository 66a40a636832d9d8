"""The Triton kernels and the engine on a GPU: whether they are right, then how fast.

    benchmarks/gpu/run.sh                                            (on a GPU)
    TRITON_INTERPRET=1 python -m benchmarks.gpu.measure --smoke      (a dry run anywhere)

Correctness comes first: bytes equal to the reference's, attention within the tolerance of the
formats, a row's bits the same in any batch. Then decode and prefill against PyTorch's attention,
the cost of factors per channel, and decodes of a model with random weights through the engine. Each
section has its share of the time; what did not fit is listed under "left_out". "bars" says what
was asked, what was measured, and whether that is enough. Nothing is downloaded. The last line of
output is the JSON. Exits with status 1 if a check fails or a section breaks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.imports import make_importable

ENGINE_IS_MISSING = make_importable()

from benchmarks.gpu.bars import bars  # noqa: E402
from benchmarks.gpu.checks import Lengths, run_checks  # noqa: E402
from benchmarks.gpu.clock import Budget, Clock, copy_bytes_per_second  # noqa: E402
from benchmarks.gpu.kernels import (  # noqa: E402
    KernelSizes,
    Point,
    decode_times,
    flex_times,
    folding_times,
    prefill_times,
)

from tightkv.files import atomic_file  # noqa: E402
from tightkv.kernels.triton import TritonBackend  # noqa: E402

SECONDS = {"decode": 110.0, "prefill": 25.0, "folding": 15.0, "flex": 25.0, "serving": 90.0}
"""Of a section; with the checks, whose kernels are compiled first, under six minutes."""


@dataclass(frozen=True)
class Sizes:
    """What is run."""

    kernels: KernelSizes = field(default_factory=KernelSizes)
    serving: dict[str, int] = field(default_factory=dict)
    checked: Lengths = ((1, 700), (1, 256), (40, 300), (70, 70), (1, 1))
    copied_bytes: int = 2**30


SMOKE = Sizes(
    kernels=KernelSizes(((4, 2, 32),), (2,), (288,), (24,), (1, 48), cold_bytes=0),
    serving={
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 64,
        "prompt_len": 24,
        "num_steps": 4,
        "budget_bytes": 2**17,
    },
    checked=((1, 270), (3, 20)),
    copied_bytes=2**16,
)


def measure(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """The report. A section that breaks is noted under "errors", and the others go on."""
    start = time.monotonic()
    backend, clock = TritonBackend(device), Clock(device)
    print(backend.name, flush=True)
    report: dict[str, Any] = {"kernels": backend.name, "torch": torch.__version__}
    report["checks"] = run_checks(backend, sizes.checked)
    copy_rate = copy_bytes_per_second(clock, device, sizes.copied_bytes)
    report["copy_gb_per_s"] = copy_rate / 1e9
    kernels = sizes.kernels
    sections: dict[str, Callable[[Budget], Iterable[Point]]] = {
        "decode": lambda budget: decode_times(backend, clock, kernels, copy_rate, budget),
        "prefill": lambda budget: prefill_times(backend, clock, kernels, budget),
        "folding": lambda budget: folding_times(backend, clock, kernels, budget),
        "serving": lambda budget: _serving(device, sizes, budget),
        "flex": lambda budget: flex_times(backend, clock, kernels, copy_rate, budget),
    }
    report["errors"], report["left_out"] = [], []
    for name, run in sections.items():
        budget = Budget(name, SECONDS[name])
        report[name] = []
        try:
            for point in run(budget):
                print(point, flush=True)
                report[name].append(point)
        except Exception as error:  # so that what a device was lent for is not lost
            traceback.print_exc()
            report["errors"].append(f"{name}: {error!r}")
        report["left_out"] += budget.left_out
    report["seconds"] = time.monotonic() - start
    report["bars"] = bars(report)
    return report


def _serving(device: torch.device, sizes: Sizes, budget: Budget) -> Iterable[Point]:
    if ENGINE_IS_MISSING is not None:
        budget.left_out.append(f"serving: the engine cannot be imported ({ENGINE_IS_MISSING})")
        return ()
    from benchmarks.gpu.serving import ServingSizes, serving_times

    return serving_times(device, ServingSizes(**sizes.serving), budget)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="sizes for Triton's interpreter")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = measure(device, SMOKE if options.smoke else Sizes())
    for bar in report["bars"]:
        print(bar)
    if options.output is not None:
        with atomic_file(options.output) as file:
            file.write(json.dumps(report, indent=1).encode())
    print(json.dumps(report))
    return 0 if report["checks"]["passed"] and not report["errors"] else 1


if __name__ == "__main__":
    sys.exit(main())
