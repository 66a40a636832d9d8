"""What the engine did in each of the last seconds."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from tightkv.metrics import EngineSnapshot, RequestStats

__all__ = ["History", "Sample"]


@dataclass(slots=True, kw_only=True)
class Sample:
    """One second.

    Attributes:
        prompt_tokens: prompt tokens computed in it.
        generation_tokens: tokens made in it.
        ttfts: seconds to first token of the requests whose first token was made in it.
        num_running: sequences in the running batch, when it was over.
        num_waiting: sequences that waited for room, when it was over.
        kv_usage: share of the blocks in use, when it was over.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0

    @property
    def ttft(self) -> float | None:
        """Median of the second's times to first token; None where there was none."""
        return median(self.ttfts) if self.ttfts else None


class History:
    """Samples of the last whole seconds. Any thread may tell and ask."""

    def __init__(
        self,
        latest_snapshot: Callable[[], EngineSnapshot],
        seconds: int = 300,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nothing.

        Args:
            latest_snapshot: the engine, not long ago; called when a second is over.
            seconds: how many samples are kept.
            clock: seconds, never going back.
        """
        self.seconds = seconds
        self._latest_snapshot = latest_snapshot
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: deque[Sample] = deque(maxlen=seconds)
        self._begin = math.floor(clock())
        self._current = Sample()
        self._num_generated = 0

    def on_tokens(self, stats: RequestStats, count: int, now: float) -> None:
        """Tokens of a request were made; the times in `stats` are still those before."""
        with self._lock:
            self._close_seconds()
            self._current.generation_tokens += count
            self._num_generated += count
            if stats.first_token_time is None:
                self._current.ttfts.append(now - stats.arrival_time)

    def on_step(self, num_tokens: int) -> None:
        """A step of prompt and generated tokens has ended; `on_tokens` has told the latter."""
        with self._lock:
            self._close_seconds()
            self._current.prompt_tokens += max(0, num_tokens - self._num_generated)
            self._num_generated = 0

    def samples(self) -> list[Sample]:
        """The whole seconds, oldest first; the last one ended less than a second ago."""
        with self._lock:
            self._close_seconds()
            return list(self._samples)

    def _close_seconds(self) -> None:
        """Keep the second that is over, and those after it, in which nothing was told."""
        now = math.floor(self._clock())
        num_over = now - self._begin
        if num_over <= 0:
            return
        snapshot = self._latest_snapshot()
        silent = [Sample() for _ in range(min(num_over - 1, self.seconds))]
        for sample in (self._current, *silent):
            sample.num_running = snapshot.num_running
            sample.num_waiting = snapshot.num_waiting
            sample.kv_usage = 1 - snapshot.num_free_blocks / snapshot.num_blocks
            self._samples.append(sample)
        self._current = Sample()
        self._begin = now
