"""Speed of linear layers with few rows: our product against oneDNN's and torch's own.

    python benchmarks/kernels/linear.py [--threads 2] [--rows 1,4,16,64,512]

The layers of SmolLM2-135M, all 30 of each kind, so that weights come from memory as in a model.
Arms take turns; the best of some rounds is given, in milliseconds for all layers. "Same bits" says
whether a row's result is the same in every batch that was tried. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tightkv.kernels import CpuBackend, WeightPanels

# Inputs and outputs of q/k/v joined, o, gate and up joined, down.
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
NUM_LAYERS = 30
ROWS_HINT = 16  # for oneDNN: with 1, its sums depend on the number of rows

Multiply = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True)
class Arm:
    """A way to multiply, and the weights as it wants them, by shape."""

    name: str
    multiply: Multiply
    weights: dict[tuple[int, int], list[Any]]

    def seconds(self, x: torch.Tensor, shape: tuple[int, int]) -> float:
        start = time.perf_counter()
        for weight in self.weights[shape]:
            self.multiply(x, weight)
        return time.perf_counter() - start

    def keeps_bits(self) -> bool:
        for shape, weights in self.weights.items():
            x = torch.randn(300, shape[0])
            whole = self.multiply(x, weights[0])
            for rows in (1, 2, 3, 5, 8, 16, 33, 129):
                if not torch.equal(self.multiply(x[:rows], weights[0]), whole[:rows]):
                    return False
        return True


def arms() -> list[Arm]:
    plain = {
        shape: [torch.randn(shape[1], shape[0]) for _ in range(NUM_LAYERS)] for shape in SHAPES
    }
    backend, onednn = CpuBackend.choose(), torch.ops.mkldnn

    def packed(pack: Callable[[torch.Tensor], Any]) -> dict[tuple[int, int], list[Any]]:
        return {shape: [pack(weight) for weight in weights] for shape, weights in plain.items()}

    return [
        Arm("TightKV float32", backend.linear, packed(WeightPanels)),
        Arm("TightKV bfloat16", backend.linear, packed(lambda w: WeightPanels(w.bfloat16()))),
        Arm(
            "oneDNN, packed",
            lambda x, weight: onednn._linear_pointwise(x, weight, None, "none", [], ""),
            packed(lambda weight: onednn._reorder_linear_weight(weight, ROWS_HINT)),
        ),
        Arm("F.linear", torch.nn.functional.linear, plain),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear layers with few rows.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,4,16,32,64,512")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    numbers = [int(number) for number in options.rows.split(",")]
    contestants = arms()
    results = []
    print(f"{'rows':>5} " + " ".join(f"{arm.name:>25}" for arm in contestants))
    for rows in numbers:
        best = dict.fromkeys([arm.name for arm in contestants], 0.0)
        for shape in SHAPES:
            x = torch.randn(rows, shape[0])
            times = [[arm.seconds(x, shape) for arm in contestants] for _ in range(options.rounds)]
            for arm, seconds in zip(contestants, zip(*times, strict=True), strict=True):
                best[arm.name] += min(seconds)
        operations = 2 * rows * NUM_LAYERS * sum(n * m for n, m in SHAPES)
        print(
            f"{rows:>5} "
            + " ".join(
                f"{t * 1e3:10.1f} ms {operations / t / 1e9:4.0f} GFLOP/s" for t in best.values()
            )
        )
        results.append({"rows": rows, "seconds": best, "operations": operations})
    same_bits = {arm.name: arm.keeps_bits() for arm in contestants}
    print(f"\nSame bits in every batch: {same_bits}")
    print(
        json.dumps(
            {
                "benchmark": "linear",
                "threads": options.threads,
                "results": results,
                "same_bits": same_bits,
            }
        )
    )


if __name__ == "__main__":
    main()
