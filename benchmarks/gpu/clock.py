"""Times of calls on a device, and what is left of a section's time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch


class Clock:
    """Median times by CUDA events; on a CPU by the clock, once."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median seconds of one of several calls that do alike work, replayed from a graph."""
        for call in calls[:2]:
            call()
        run = self._graph(calls) if self._cuda else lambda: [call() for call in calls]
        once = self._once(run)
        repeats = max(3, min(50, int(0.05 / max(once, 1e-6)))) if self._cuda else 1
        return statistics.median(self._once(run) for _ in range(repeats)) / len(calls)

    def _graph(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def _once(self, run: Callable[[], object]) -> float:
        if not self._cuda:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class Budget:
    """Seconds of a section. What does not fit any more is left out, and is said to be."""

    def __init__(self, section: str, seconds: float) -> None:
        self._section = section
        self._end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def has_time_for(self, what: object) -> bool:
        if time.monotonic() < self._end:
            return True
        self.left_out.append(f"{self._section}: {what}")
        return False


def copy_bytes_per_second(clock: Clock, device: torch.device, num_bytes: int) -> float:
    """Bytes read and written by a copy within the device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / clock.seconds([lambda: target.copy_(source)] * 4)
