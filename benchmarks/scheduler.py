"""What scheduling costs, and what preemption loses by victim and reserve; no model runs.

    python -m benchmarks.scheduler [--steps 2000] [--only overhead,loss]

overhead: scheduler and cache manager with 256 sequences that run, with 1 and with 5 layer groups
and room for all, and in a pool that is always full. Timed is all that a step of the engine asks of
the two: schedule, offer the new blocks, let go of the finished.

loss: requests that are all there at the start go through pools of several sizes. Their lengths are
those of Azure's conversation trace, or have longer answers. The model's time is estimated from the
figures in docs/benchmarks.md (SmolLM2-135M, two cores): 12 ms a step, 1.05 ms a token, 0.7 ms per
1,000 cached tokens.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from benchmarks.serving.machine import describe_machine
from benchmarks.serving.request_lengths import Lengths, draw_lengths
from tightkv.config import SchedulerConfig
from tightkv.engine.detokenizer import IncrementalDetokenizer
from tightkv.engine.sampler import SamplingState
from tightkv.engine.sampling_params import SamplingParams
from tightkv.engine.scheduler import ScheduledChunk, Scheduler
from tightkv.engine.sequence import Sequence
from tightkv.kvcache import KVCacheManager
from tightkv.metrics import EngineStats

BLOCK_SIZE = 16
PARAMS = SamplingParams(detokenize=False)
NO_TOKENIZER = cast(PreTrainedTokenizerBase, None)  # PARAMS ask for none


class Simulation:
    """An engine without a model: every step's tokens are drawn."""

    def __init__(
        self,
        kind: type[Scheduler],
        num_blocks: int,
        *,
        windows: tuple[int | None, ...] = (None,),
        max_num_seqs: int = 256,
        prefix_caching: bool = True,
    ) -> None:
        self.stats = EngineStats()
        config = SchedulerConfig(max_num_seqs=max_num_seqs)
        self.manager = KVCacheManager(
            windows,
            num_blocks,
            BLOCK_SIZE,
            b"",
            prefix_caching,
            max_chunk=config.max_num_batched_tokens,
        )
        self._shares = prefix_caching
        self.scheduler = kind(config, self.manager, self.stats)
        self._random = random.Random(0)
        self._num_added = 0

    def add(self, lengths: Lengths) -> None:
        self._num_added += 1
        name = str(self._num_added)
        prompt = self._random.choices(range(50_000), k=lengths.prompt)
        self.scheduler.add(
            Sequence(
                seq_id=name,
                request_id=name,
                index=0,
                params=PARAMS,
                prompt_len=lengths.prompt,
                token_ids=prompt,
                max_tokens=lengths.answer,
                sampling=SamplingState.create(PARAMS, prompt, 0),
                detokenizer=IncrementalDetokenizer(NO_TOKENIZER, prompt, PARAMS),
                hasher=self.manager.new_hasher(name),
            )
        )

    def step(self) -> tuple[list[ScheduledChunk], float]:
        """One step; the seconds are those of scheduler and manager."""
        begin = time.perf_counter()
        chunks = self.scheduler.schedule()
        scheduled = time.perf_counter()
        for chunk in chunks:
            self._compute(chunk)
        computed = time.perf_counter()
        for sequence in (chunk.sequence for chunk in chunks):
            if self._shares:
                self.manager.remember_blocks(
                    sequence.seq_id,
                    sequence.token_ids,
                    sequence.num_computed_tokens,
                )
            if sequence.is_finished:
                self.scheduler.release(sequence)
        return chunks, scheduled - begin + time.perf_counter() - computed

    def _compute(self, chunk: ScheduledChunk) -> None:
        sequence, completes = chunk.sequence, chunk.completes
        sequence.num_computed_tokens += chunk.num_tokens
        if completes:
            sequence.token_ids.append(self._random.randrange(50_000))
            if sequence.num_output_tokens >= sequence.max_tokens:
                sequence.finish("length")


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
    roomy, full = num_seqs * 48, num_seqs * 16
    works: tuple[tuple[str, tuple[int | None, ...], int], ...] = (
        ("1 group", (None,), roomy),
        ("5 groups, 4 with a window", (None, 512, 512, 512, 512), 5 * roomy),
        ("1 group, full pool", (None,), full),
    )
    for work, windows, num_blocks in works:
        simulation = Simulation(Scheduler, num_blocks, windows=windows, max_num_seqs=num_seqs)
        yield _overhead_of(work, simulation, num_steps, num_seqs)


def _overhead_of(work: str, simulation: Simulation, num_steps: int, num_seqs: int) -> Overhead:
    """Some sequences always wait, so that as many run as may."""
    source, scheduler = random.Random(1), simulation.scheduler
    running: list[int] = []
    times: list[float] = []

    def fill() -> None:
        while len(scheduler.waiting) < 32:
            simulation.add(Lengths(source.randint(32, 256), source.randint(64, 512)))

    for _ in range(3 * num_seqs):
        fill()
        simulation.step()
    before = simulation.stats.num_preemptions
    for _ in range(num_steps):
        fill()
        chunks, seconds = simulation.step()
        running.append(len(chunks))
        times.append(seconds * 1e3 * 64 / len(chunks))
    quarter = len(times) // 4
    return Overhead(
        work,
        statistics.fmean(running),
        statistics.median(times),
        statistics.quantiles(times, n=100)[98],
        statistics.median(times[:quarter]),
        statistics.median(times[-quarter:]),
        simulation.stats.num_preemptions - before,
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
                    simulation = Simulation(
                        kind, num_blocks, max_num_seqs=64, prefix_caching=prefix_caching
                    )
                    simulation.scheduler.num_reserved_tokens = num_reserved_tokens
                    seconds, num_computed, running = _run(simulation, requests)
                    yield Loss(
                        load,
                        num_blocks,
                        prefix_caching,
                        way,
                        seconds,
                        simulation.stats.num_preemptions,
                        1 - sum(each.prompt + each.answer - 1 for each in requests) / num_computed,
                        running,
                    )


def _run(simulation: Simulation, requests: list[Lengths]) -> tuple[float, int, float]:
    """Estimated seconds of the model, tokens it computes, sequences per step."""
    for lengths in requests:
        simulation.add(lengths)
    seconds, num_computed, num_chunks, num_steps = 0.0, 0, 0, 0
    while simulation.scheduler.has_work:
        chunks, _ = simulation.step()
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
