"""What the drivers share.

A driver runs one work in one engine, by that engine's own interpreter:

    PYTHON -m benchmarks.serving.ENGINE_driver WORK --model PATH [--option ...]

Progress goes to stderr; the last line of stdout is one JSON object. Nothing here needs more than
the standard library, since the interpreters share nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "FIRST_TOKEN",
    "Prompts",
    "Result",
    "Work",
    "median_seconds",
    "progress",
    "run",
    "say_first_token",
    "seconds_by_length",
    "timed_answers",
]

FIRST_TOKEN = "FIRST_TOKEN"
"""The line that a driver prints when the engine has given its first token."""

TURNS = 8
"""How often `seconds_by_length` comes back to each length."""

Result = dict[str, Any]
Work = Callable[[argparse.Namespace], Result]
Prompts = list[list[int]]


def run(version: str, works: Mapping[str, Work]) -> None:
    """Do the work that the command line names, and print its result."""
    options = _parse(works)
    result = works[options.work](options)
    print(json.dumps({"version": version, **result}), flush=True)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def say_first_token() -> None:
    """Tell who waits outside that the first token is there."""
    print(FIRST_TOKEN, flush=True)


def median_seconds(step: Callable[[], object], count: int) -> float:
    """Median seconds of a step that is run `count` times."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def seconds_by_length(
    lengths: Sequence[int], steps: int, begin: Callable[[int], Callable[[], object]]
) -> list[float]:
    """Median seconds of a decode step at each cached length.

    Lengths take turns in random order: a slow minute of the machine, or one in which the processor
    runs at another speed, hits all of them, and not the slope.

    Args:
        lengths: cached tokens.
        steps: steps of one turn.
        begin: goes back to a length, and returns what makes its next step; called again for each
            turn. One step more than `steps` is made.
    """
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for turn in range(TURNS):
        progress(f"turn {turn + 1} of {TURNS}")
        for length in random.sample(list(lengths), len(lengths)):
            step = begin(length)
            step()  # the length before has used the processor's cache
            seconds[length].append(median_seconds(step, steps))
    return [statistics.median(seconds[length]) for length in lengths]


def timed_answers(
    generate: Callable[[Prompts, int], Prompts], options: argparse.Namespace
) -> Result:
    """Time an engine's `generate(prompts, new_tokens)`, which returns the new tokens.

    Before that, the same prompts get two tokens each, so that no shape is met for the first time.
    """
    progress("warming up")
    generate(options.prompts, 2)
    progress(f"answering {len(options.prompts)} prompts with {options.new_tokens} tokens each")
    start = time.perf_counter()
    answers = generate(options.prompts, options.new_tokens)
    seconds = time.perf_counter() - start
    lengths = [len(answer) for answer in answers]
    if lengths != [options.new_tokens] * len(options.prompts):
        raise RuntimeError(f"{options.new_tokens} tokens were asked for, and {lengths} came")
    return {"seconds": seconds, "tokens_per_second": sum(lengths) / seconds, "answers": answers}


def _parse(works: Mapping[str, Work]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs one work of the benchmark in one engine.")
    parser.add_argument("work", choices=sorted(works))
    parser.add_argument("--model", help="the model's file or folder, as the engine wants it")
    parser.add_argument("--output", type=Path, help="file to write (prepare)")
    parser.add_argument("--prompts", type=_prompts, help="JSON file: a list of lists of token ids")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-cache", default="auto", help="format of K and V, in engine's words")
    parser.add_argument("--kv-cache-bytes", type=int, default=2**30, help="KV cache budget")
    parser.add_argument("--max-model-len", type=int, help="longest sequence")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens per answer")
    parser.add_argument("--lengths", type=int, nargs="+", help="cached lengths (slope)")
    parser.add_argument("--steps", type=int, default=16, help="decode steps per length")
    parser.add_argument("--repeats", type=int, default=60, help="timed turns of each kernel")
    parser.add_argument("--batch-size", type=int, default=512, help="most tokens per call")
    parser.add_argument("--kv-unified", type=int, default=1, help="one buffer for all sequences")
    parser.add_argument("--block-size", type=int, help="tokens per block; default: the engine's")
    parser.add_argument("--enforce-eager", type=int, default=0, help="compile nothing")
    return parser.parse_args()


def _prompts(path: str) -> Prompts:
    prompts: Prompts = json.loads(Path(path).read_text(encoding="utf-8"))
    return prompts
