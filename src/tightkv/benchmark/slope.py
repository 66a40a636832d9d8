"""How the time of a decode step grows with the context: a line through some lengths."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from tightkv.benchmark.data import Vocabulary
from tightkv.calibration.progress import Progress, no_progress
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.sampling_params import SamplingParams

__all__ = ["ItlLine", "break_even_context", "choose_contexts", "fit_line", "measure_itl"]

_NUM_CONTEXTS = 5
_SHORTEST = 64
_TURNS, _STEPS = 6, 8
_MARGIN = _STEPS + 4


@dataclass(frozen=True, slots=True)
class ItlLine:
    """Seconds between two tokens of one sequence = slope × context + intercept.

    Attributes:
        contexts: tokens in the cache.
        seconds: of a decode step at each, median.
        slope: seconds per token of context.
        intercept: seconds.
    """

    contexts: tuple[int, ...]
    seconds: tuple[float, ...]
    slope: float
    intercept: float


def choose_contexts(longest: int) -> tuple[int, ...]:
    """Lengths evenly apart, up to what a sequence of `longest` tokens leaves room for.

    None if that is too short for a line.
    """
    top = longest - _MARGIN
    if top < 2 * _SHORTEST:
        return ()
    return tuple(round(each) for each in numpy.linspace(_SHORTEST, top, _NUM_CONTEXTS))


def measure_itl(
    engine: LLMEngine,
    vocabulary: Vocabulary,
    contexts: Sequence[int],
    progress: Progress = no_progress,
    stage: str = "",
) -> ItlLine:
    """Time decode steps of one sequence at each context.

    Contexts take turns in random order: a slow minute of the machine hits all of them, and not
    the slope. The prefix cache keeps the text, so that a turn costs its steps alone.
    """
    rng = random.Random("slope")
    text = vocabulary.draw(rng, max(contexts))
    _decode(engine, text, steps=1)
    seconds: dict[int, list[float]] = {context: [] for context in contexts}
    for turn in range(_TURNS):
        for number, context in enumerate(rng.sample([*contexts], len(contexts))):
            progress(stage, turn * len(contexts) + number, _TURNS * len(contexts))
            seconds[context].append(_decode(engine, text[:context], _STEPS))
    medians = [statistics.median(seconds[context]) for context in contexts]
    return fit_line(contexts, medians)


def fit_line(contexts: Sequence[int], seconds: Sequence[float]) -> ItlLine:
    """The line of least squares."""
    slope, intercept = numpy.polyfit(contexts, seconds, 1)
    return ItlLine(tuple(contexts), tuple(seconds), float(slope), float(intercept))


def break_even_context(line: ItlLine, base: ItlLine) -> float | None:
    """Context from which on `line` is the faster one; None if it never is.

    0 if it is faster at every context.
    """
    if line.slope >= base.slope:
        is_always = line.intercept < base.intercept and line.slope == base.slope
        return 0.0 if is_always else None
    return max(0.0, (line.intercept - base.intercept) / (base.slope - line.slope))


def _decode(engine: LLMEngine, prompt: Sequence[int], steps: int) -> float:
    """Median seconds of a decode step after this prompt."""
    params = SamplingParams(temperature=0, max_tokens=steps + 2, ignore_eos=True, detokenize=False)
    request = engine.add_request("bench-slope", prompt, params)
    try:
        while not request.sequences[0].num_output_tokens:
            engine.step()
        engine.step()  # the context before has used the processor's cache
        times = [time.perf_counter()]
        for _ in range(steps):
            engine.step()
            times.append(time.perf_counter())
    finally:
        engine.abort_request("bench-slope")
    return float(numpy.median(numpy.diff(times)))
