"""Next-token distributions of each arm against the baseline's, on text that is forced.

Two passes over each window: `prefill` reads it as a prompt, chunk by chunk; `decode` forces tokens
one per step behind what the arm's own prefix cache holds. What each token says goes into the
journal, and figures are made from what the journal gives back, so that a run which was interrupted
ends with the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
from numpy.typing import NDArray

from tightkv.calibration.progress import Progress, no_progress
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import RequestError
from tightkv.evaluation.arms import Arm, Arms
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.lockstep import LockstepResult, forced, prompted, read_in_lockstep
from tightkv.evaluation.report import BucketFigures, FidelityPass, PassName
from tightkv.metrics import Divergence, DivergenceFigures

__all__ = ["decode_parts", "measure_fidelity", "measure_layer_groups", "measure_noise_floor"]

_NUM_PARTS, _PART_SIZE = 16, 32
"""Parts of a window that are decoded, more if buckets need them, and tokens of each, more if a
block is longer."""

_DECODE_WORK = 2
"""How long a decoded token takes, in prompt tokens: with SmolLM2-135M, 16 sequences at a time."""

_DIGITS = 9
"""Significant digits in the journal."""

Measured = Callable[[Callable[[int], None]], LockstepResult]


def measure_fidelity(
    arms: Arms,
    windows: Sequence[Sequence[int]],
    buckets: Sequence[int],
    journal: Journal,
    progress: Progress,
) -> dict[str, dict[PassName, FidelityPass]]:
    """Compare all arms with the baseline, in both passes.

    Args:
        arms: with prefix caching.
        windows: token ids.
        buckets: ascending numbers of preceding tokens, at which buckets begin; the last one goes on
            to the longest window.
        journal: for what is measured.
        progress: told how far it is.

    Returns:
        By arm and pass.

    Raises:
        RequestError: if no window has two tokens.
        EngineError: if an arm failed.
    """
    windows = _readable(windows)
    block_size = arms.base.engine.config.cache.block_size
    parts = [decode_parts(len(window), buckets, block_size) for window in windows]
    counts = [_DECODE_WORK * sum(map(len, of)) for of in parts]
    work = _Work("fidelity", sum(map(len, windows)) + sum(counts), progress)
    records: dict[PassName, list[Any]] = {"prefill": [], "decode": []}
    for index, (window, of, count) in enumerate(zip(windows, parts, counts, strict=True)):
        # Decode comes right behind prefill, which has filled the prefix caches.
        prefill = partial(_prefill, arms, window)
        decode = partial(_decode, arms, window, of)
        records["prefill"].append(
            work.once(journal, f"fidelity/prefill/{index}", prefill, len(window))
        )
        records["decode"].append(work.once(journal, f"fidelity/decode/{index}", decode, count))
    return {
        arm.name: {name: _pass_figures(of, arm.name, buckets) for name, of in records.items()}
        for arm in arms.others
    }


def measure_noise_floor(
    base: Arm, other: Arm, window: Sequence[int], journal: Journal
) -> DivergenceFigures:
    """How far the baseline is from itself when prompts are cut into other chunks.

    Args:
        base: the baseline.
        other: the same cache in an engine with another max_num_batched_tokens.
        window: token ids.
        journal: for what is measured.

    Raises:
        RequestError: if the window has less than two tokens.
    """
    arms = Arms(base, (other,))
    (window,) = _readable([window])
    work = _Work("noise floor", len(window), no_progress)
    record = work.once(journal, "noise floor", partial(_prefill, arms, window), len(window))
    return _divergence(record, other.name).figures()


def measure_layer_groups(
    arms: Arms, windows: Sequence[Sequence[int]], journal: Journal, progress: Progress
) -> dict[str, DivergenceFigures]:
    """Compare arms whose formats act in some layers only; the prefill pass alone.

    Args:
        arms: their names tell the layers, too.
        windows: token ids.
        journal: for what is measured.
        progress: told how far it is.

    Raises:
        RequestError: if no window has two tokens.
        EngineError: if an arm failed.
    """
    windows = _readable(windows)
    names = ", ".join(arm.name for arm in arms.others)
    work = _Work(names, sum(map(len, windows)), progress)
    records = [
        work.once(
            journal,
            f"layer groups/{names}/{index}",
            partial(_prefill, arms, window),
            len(window),
        )
        for index, window in enumerate(windows)
    ]
    return {arm.name: _pass_figures(records, arm.name, ()).overall for arm in arms.others}


def decode_parts(num_tokens: int, buckets: Sequence[int], block_size: int) -> list[range]:
    """Tokens of a window that are decoded: parts spread evenly over each bucket.

    Each part begins right behind a full block, so that the prefix cache gives all but the last
    token before it, and that one, too, is a decode step. A short window is decoded as a whole.

    Args:
        num_tokens: of the window.
        buckets: as in `measure_fidelity`.
        block_size: tokens per block of the cache.

    Returns:
        Indices of tokens, part by part.
    """
    size = -(-_PART_SIZE // block_size) * block_size
    starts = range(1, num_tokens, size)
    chosen: set[int] = set()
    for begin, end in _edges(buckets, num_tokens) or [(0, num_tokens)]:
        inside = [start for start in starts if begin <= start < end]
        # A bucket without a start of its own is reached from the one before it.
        inside = inside or [start for start in starts if start < end][-1:]
        count = round(_NUM_PARTS * len(inside) / len(starts)) or len(inside[:1])
        chosen |= {inside[i * len(inside) // count] for i in range(count)}
    return [range(start, min(start + size, num_tokens)) for start in sorted(chosen)]


class _Work:
    """What there is to do, in tokens, and how much of it is done."""

    def __init__(self, stage: str, total: int, progress: Progress) -> None:
        self._stage, self._total, self._progress = stage, total, progress
        self._done = 0

    def once(self, journal: Journal, key: str, measure: Measured, amount: int) -> Any:
        """The journal's record, measured if it is not there; `amount` is done then."""
        end = self._done + amount

        def on_rows(count: int) -> None:
            self._done += count
            self._progress(self._stage, self._done, self._total)

        record = journal.once(key, lambda: _record(measure(on_rows)))
        self._done = end
        self._progress(self._stage, end, self._total)
        return record


def _readable(windows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Windows in which a token is predicted."""
    readable = [window for window in windows if len(window) > 1]
    if not readable:
        raise RequestError("No window of the text has two tokens: give more text.")
    return readable


def _prefill(arms: Arms, window: Sequence[int], on_rows: Callable[[int], None]) -> LockstepResult:
    return read_in_lockstep(arms, [prompted("window", window)], on_rows)


def _decode(
    arms: Arms,
    window: Sequence[int],
    parts: Sequence[range],
    on_rows: Callable[[int], None],
) -> LockstepResult:
    once = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    for arm in arms:
        # A step where the prefix cache has the window; otherwise it is read again.
        arm.generate([window[: parts[-1].start]], [once], lambda _index, _output: None)
    readings = [forced(f"part-{part.start}", window[: part.stop], part.start) for part in parts]
    return read_in_lockstep(arms, readings, lambda count: on_rows(_DECODE_WORK * count))


def _record(result: LockstepResult) -> dict[str, Any]:
    """What goes into the journal; the baseline's values once."""
    divergences = result.divergences
    first = next(iter(divergences.values()))
    return {
        "contexts": result.contexts,
        "logprob_base": _rounded(first.logprob_base),
        "arms": {
            name: {
                "kl": _rounded(of.kl),
                "logprob": _rounded(of.logprob),
                "same_top": of.same_top.astype(int).tolist(),
            }
            for name, of in divergences.items()
        },
    }


def _rounded(values: NDArray[numpy.float64]) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values.tolist()]


def _divergence(record: Any, name: str) -> Divergence:
    arm = record["arms"][name]
    lists = (arm["kl"], arm["logprob"], record["logprob_base"], arm["same_top"])
    return Divergence(*(numpy.array(values, dtype=numpy.float64) for values in lists))


def _pass_figures(records: Sequence[Any], name: str, buckets: Sequence[int]) -> FidelityPass:
    whole = Divergence.concatenated([_divergence(record, name) for record in records])
    contexts = numpy.concatenate([numpy.array(record["contexts"]) for record in records])
    inside = [
        (begin, end, (contexts >= begin) & (contexts < end))
        for begin, end in _edges(buckets, int(contexts.max()) + 1)
    ]
    return FidelityPass(
        overall=whole.figures(),
        buckets=tuple(
            BucketFigures(begin=begin, end=end, figures=whole[mask].figures())
            for begin, end, mask in inside
            if mask.any()
        ),
    )


def _edges(buckets: Sequence[int], num_tokens: int) -> list[tuple[int, int]]:
    """Begin and end of each bucket that has contexts below `num_tokens`."""
    begins = [begin for begin in buckets if begin < num_tokens]
    ends = list(buckets[1 : len(begins)])
    following = buckets[len(begins)] if len(begins) < len(buckets) else num_tokens
    return list(zip(begins, [*ends, following], strict=True)) if begins else []
