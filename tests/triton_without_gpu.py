"""Calls the Triton backend as on a GPU of compute capability 9.0, up to the launch.

A process of its own: Triton is given a driver that only names its target, and compiles instead of
launching. What the interpreter does not see is seen here: how arguments become a kernel's types.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cache_cases import make_scene, write
from tightkv.kernels import AttentionParams, paged_attention
from tightkv.kernels.triton import backend
from tightkv.kernels.triton.shapes import DeviceTraits


class PretendDriver:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(PretendDriver())
    traits = DeviceTraits(native_fp8=True, ptx=True, f32_precision="tf32x3", num_units=132)
    launched: list[str] = []
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launched.append(self.__name__)
        return launch(self, *arguments, grid=grid, warmup=True, **options)

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(backend, "_traits_of", return_value=(traits, "pretended")),
    ):
        kernels = backend.TritonBackend(torch.device("cpu"))
        for name in ("int8+channel+dynamic", "fp8_e4m3+head"):
            scene = make_scene(k=name, v=name, lengths=((1, 300), (4, 20)))
            params = AttentionParams(0.125, 100, 3.0, torch.zeros(4))
            key, value = torch.randn(2, 5, 2, 64)
            for _ in range(2):
                start = time.perf_counter()
                write(kernels, scene.cache, key, value, torch.arange(5))
                paged_attention(kernels, scene.query, scene.cache, scene.batch, params)
            print(f"{name}: {time.perf_counter() - start:.4f} s on the host")  # noqa: T201
    print(*launched[:4])  # noqa: T201


if __name__ == "__main__":
    main()
