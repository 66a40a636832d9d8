"""What scheduling costs, and what preemption loses by victim and reserve; no model runs.

    python -m benchmarks.scheduler [--steps 2000] [--only overhead,loss]

overhead: scheduler and cache manager with 256 sequences that run, with 1 and with 5 layer groups
and room for all, in a pool that is always full, and there without a reserve, so that sequences are
preempted, and computed anew or moved to a swap space and back (small blocks). Timed is all that a
step of the engine asks of the two: schedule, offer the new blocks, let go of the finished.

loss: requests that are all there at the start go through pools of several sizes. Their lengths are
those of Azure's conversation trace, or have longer answers. The model's time is estimated from the
figures in docs/benchmarks.md (SmolLM2-135M, two cores): 12 ms a step, 1.05 ms a token, 0.7 ms per
1,000 cached tokens.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.modelless import ModellessEngine
from benchmarks.serving.machine import describe_machine
from benchmarks.serving.request_lengths import Lengths, draw_lengths
from tightkv.config import SchedulerConfig
from tightkv.engine.scheduler import Scheduler
from tightkv.engine.sequence import Sequence

# ---- overhead ----


@dataclass(frozen=True)
class Overhead:
    """Milliseconds per step and 64 running sequences."""

    work: str
    running: float
    median: float
    p99: float
    first_quarter: float
    last_quarter: float
    preemptions: int


def measure_overhead(num_steps: int, num_seqs: int) -> Iterator[Overhead]:
    roomy, full, config = num_seqs * 48, num_seqs * 16, SchedulerConfig(max_num_seqs=num_seqs)
    windows = (None, 512, 512, 512, 512)
    works = {
        "1 group": ModellessEngine(config, roomy),
        "5 groups, 4 with a window": ModellessEngine(config, 5 * roomy, windows=windows),
        "1 group, full pool": ModellessEngine(config, full),
        "1 group, full pool, no reserve": ModellessEngine(config, full),
        "1 group, full pool, no reserve, swap": ModellessEngine(config, full, num_slots=full),
    }
    for work, engine in works.items():
        if "no reserve" in work:  # so that some are preempted in most steps
            engine.scheduler.num_reserved_tokens = 0
        yield _overhead_of(work, engine, num_steps, num_seqs)


def _overhead_of(work: str, engine: ModellessEngine, num_steps: int, num_seqs: int) -> Overhead:
    """Some sequences always wait, so that as many run as may."""
    source, scheduler, numbers = random.Random(1), engine.scheduler, itertools.count()
    running: list[int] = []
    times: list[float] = []

    def fill() -> None:
        while len(scheduler.waiting) < 32:
            prompt = source.choices(range(50_000), k=source.randint(32, 256))
            engine.add(str(next(numbers)), prompt, source.randint(64, 512))

    for _ in range(3 * num_seqs):
        fill()
        engine.step()
    before = engine.stats.num_preemptions
    for _ in range(num_steps):
        fill()
        running.append(len(engine.step()))
        times.append(engine.seconds * 1e3 * 64 / running[-1])
    quarter = len(times) // 4
    return Overhead(
        work,
        statistics.fmean(running),
        statistics.median(times),
        statistics.quantiles(times, n=100)[98],
        statistics.median(times[:quarter]),
        statistics.median(times[-quarter:]),
        engine.stats.num_preemptions - before,
    )


# ---- loss ----


@dataclass(frozen=True)
class Loss:
    """What one way of choosing lost.

    Attributes:
        seconds: of the model, as estimated.
        computed_twice: share of all computed tokens.
        running: sequences per step.
    """

    load: str
    num_blocks: int
    prefix_caching: bool
    way: str
    seconds: float
    preemptions: int
    computed_twice: float
    running: float


class Youngest(Scheduler):
    """Preempts the sequence that came last, whatever it costs."""

    def _cost(self, sequence: Sequence) -> int:
        return -sequence.rank[1]


# Victim, and tokens reserved for each running sequence.
WAYS: dict[str, tuple[type[Scheduler], int]] = {
    "youngest, 0": (Youngest, 0),
    "cheapest, 0": (Scheduler, 0),
    "cheapest, 16": (Scheduler, 16),
    "cheapest, 32": (Scheduler, 32),
    "youngest, 64": (Youngest, 64),
    "cheapest, 64": (Scheduler, 64),
    "cheapest, 128": (Scheduler, 128),
    "cheapest, 256": (Scheduler, 256),
}


def loads(num_requests: int) -> dict[str, list[Lengths]]:
    source = random.Random(0)
    return {
        "Azure": draw_lengths(num_requests, seed=0),
        "long answers": [
            Lengths(source.randint(16, 64), source.randint(200, 800)) for _ in range(num_requests)
        ],
    }


def measure_loss(num_requests: int) -> Iterator[Loss]:
    for load, requests in loads(num_requests).items():
        for num_blocks in (512, 1024):
            for prefix_caching in (True, False):
                for way, (kind, num_reserved_tokens) in WAYS.items():
                    engine = ModellessEngine(
                        SchedulerConfig(max_num_seqs=64),
                        num_blocks,
                        prefix_caching=prefix_caching,
                        kind=kind,
                    )
                    engine.scheduler.num_reserved_tokens = num_reserved_tokens
                    seconds, num_computed, running = _run(engine, requests)
                    yield Loss(
                        load,
                        num_blocks,
                        prefix_caching,
                        way,
                        seconds,
                        engine.stats.num_preemptions,
                        1 - sum(each.prompt + each.answer - 1 for each in requests) / num_computed,
                        running,
                    )


def _run(engine: ModellessEngine, requests: list[Lengths]) -> tuple[float, int, float]:
    """Estimated seconds of the model, tokens it computes, sequences per step."""
    source = random.Random(0)
    for number, lengths in enumerate(requests):
        prompt = source.choices(range(50_000), k=lengths.prompt)
        engine.add(str(number), prompt, lengths.answer)
    seconds, num_computed, num_chunks, num_steps = 0.0, 0, 0, 0
    while engine.scheduler.has_work:
        chunks = engine.step()
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        num_cached = sum(chunk.sequence.num_computed_tokens for chunk in chunks)
        seconds += 12e-3 + 1.05e-3 * num_tokens + 0.7e-6 * num_cached
        num_computed += num_tokens
        num_chunks += len(chunks)
        num_steps += 1
    return seconds, num_computed, num_chunks / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of scheduling, loss by preemption.")
    parser.add_argument("--steps", type=int, default=2000, help="timed steps")
    parser.add_argument("--seqs", type=int, default=256, help="sequences that run in them")
    parser.add_argument("--requests", type=int, default=300, help="requests of each loss")
    parser.add_argument("--only", default="overhead,loss", help="of overhead,loss")
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "scheduler", "machine": describe_machine()}
    works: dict[str, tuple[str, Iterator[Overhead | Loss]]] = {
        "overhead": ("ms per step and 64 sequences", measure_overhead(options.steps, options.seqs)),
        "loss": ("victim and reserve", measure_loss(options.requests)),
    }
    for name in options.only.split(","):
        title, rows = works[name]
        print(title)
        result[name] = []
        for row in rows:
            fields = vars(row)
            result[name].append(fields)
            print("  ".join(f"{key} {_shown(value)}" for key, value in fields.items()))
    print(json.dumps(result))


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
