"""What the engine asks of a device that is no CPU, besides what its tensors do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tightkv.engine.graphs import Replay

__all__ = ["Accelerator", "CudaAccelerator", "MemoryReading"]


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes of a device.

    Attributes:
        total: in all.
        free: that nobody has taken, this process neither.
        held: taken by this process for its tensors, those that it has freed included.
        used: of its tensors now.
        peak: of its tensors, the most since `forget_peak`.
    """

    total: int
    free: int
    held: int
    used: int
    peak: int


class Accelerator(Protocol):
    """One device. All of its work is done in order, on one stream."""

    device: torch.device

    def pin(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host that the device copies from and to directly, uint8 `[num_bytes]`."""

    def memory(self) -> MemoryReading:
        """Wait until all is done, and tell."""

    def forget_peak(self) -> None:
        """Give free memory back to the device, and let the peak begin anew."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Run it twice: to be ready, and to note what it launches."""


class CudaAccelerator:
    """An accelerator by torch's interface for CUDA, which AMD's devices have, too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None  # of the memory that captured steps share; torch hides its type

    def pin(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def memory(self) -> MemoryReading:
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryReading(
            total=total,
            free=free,
            held=torch.cuda.memory_reserved(self.device),
            used=torch.cuda.memory_allocated(self.device),
            peak=torch.cuda.max_memory_allocated(self.device),
        )

    def forget_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def capture(self, run: Callable[[], None]) -> Replay:
        # Libraries take their workspaces, and kernels are compiled and loaded, at the first use.
        run()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = graph.pool()
        return graph.replay
