"""Needle in a haystack: is a sentence found again that stands somewhere in a long text?

The prompt is the user's own text with "The secret number of WORD is NUMBER." at a depth, and at
the end "The secret number of WORD is"; no chat template, so that base models are asked as chat
models are, and a prompt has exactly the tokens asked for.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tightkv.calibration.progress import Progress
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import RequestError
from tightkv.evaluation.arms import Arms
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.report import RetrievalCell, RetrievalFigures
from tightkv.evaluation.tasks.item import Answers, Item, Scores, score_all
from tightkv.evaluation.tasks.likelihood import force, log_likelihood, split_tokens
from tightkv.evaluation.tasks.task import Tokenize

__all__ = ["build_prompt", "measure_retrieval"]

_WORDS = (
    *("amber", "basket", "candle", "dolphin", "engine", "feather", "garden", "hammer", "island"),
    *("jacket", "kettle", "lantern", "mirror", "needle", "orchard", "pepper", "quarry", "ribbon"),
    *("saddle", "temple", "umbrella", "violin", "window", "yellow"),
)
_SPARE_TOKENS = 4  # of an answer that begins with a word or a space before the number

Place = tuple[int, float]
"""Length and depth."""


@dataclass(frozen=True, slots=True)
class _Needle:
    """A hidden sentence, and the question for it.

    Attributes:
        hidden, question, answer: token ids.
        number: what is to be found.
    """

    hidden: list[int]
    question: list[int]
    answer: list[int]
    number: str


def measure_retrieval(
    arms: Arms,
    filler: Sequence[int],
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
    journal: Journal,
    progress: Progress,
) -> tuple[tuple[RetrievalCell, ...], dict[str, RetrievalFigures]]:
    """Hide sentences at each depth of texts of each length, and ask for them.

    Args:
        arms: the baseline and the others.
        filler: token ids of the text; repeated where it is shorter than a prompt.
        lengths: tokens of the whole prompt, hidden sentence and question included.
        depths: from 0, where the sentence comes first, to 1, where it comes last.
        trials: sentences per length and depth, the same ones everywhere.
        seed: of words and numbers.
        journal: has each trial under "retrieval/{arm}/{length}/{depth}/{trial}".
        progress: called after each trial.

    Returns:
        The baseline's cells, by length and depth; and the figures of the other arms, by name.

    Raises:
        RequestError: if a length or a depth cannot be had; before anything runs.
        EngineError: if a request failed.
    """
    items = _items(arms.base.engine.tokenize, filler, lengths, depths, trials, seed)
    scores = score_all(items, arms, journal, "retrieval", progress)
    places = list(itertools.product(sorted(set(lengths)), sorted(set(depths))))
    cells = {
        name: tuple(_cell(of_arm, place) for place in places) for name, of_arm in scores.items()
    }
    base = cells[arms.base.name]
    return base, {arm.name: _figures(cells[arm.name], base) for arm in arms.others}


def build_prompt(
    first: Sequence[int],
    filler: Sequence[int],
    hidden: Sequence[int],
    question: Sequence[int],
    length: int,
    depth: float,
) -> list[int]:
    """Token ids of a prompt of `length` tokens.

    Args:
        first: what each text begins with.
        filler: the text, repeated as often as needed.
        hidden, question: the sentence at the depth, and the end.
        length, depth: as in `measure_retrieval`.

    Raises:
        RequestError: if sentence and question do not fit, or there is no text.
    """
    room = length - len(first) - len(hidden) - len(question)
    if room < 1 or not filler:
        raise RequestError(
            f"A text of {length} tokens cannot hide a sentence of {len(hidden)} and a question of "
            f"{len(question)}: give a greater --retrieval-lengths, and some text."
        )
    text = list(itertools.islice(itertools.cycle(filler), room))
    before = round(depth * room)
    return [*first, *text[:before], *hidden, *text[before:], *question]


def _items(
    tokenize: Tokenize,
    filler: Sequence[int],
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
) -> dict[str, Item]:
    """By the name of the trial.

    Texts with the sentence at their end come first, the longest of all before the others: they
    leave the whole text in the prefix cache, whose beginning all others share.
    """
    if trials < 1 or not all(0 <= depth <= 1 for depth in depths):
        raise RequestError(
            f"retrieval has {trials} trials and the depths {list(depths)}: give at least one "
            "trial, and depths from 0 to 1."
        )
    first = tokenize("")
    needles = [_make_needle(tokenize, random.Random(f"{seed}/{trial}")) for trial in range(trials)]
    return {
        f"{length}/{depth}/{trial}": _item(
            build_prompt(first, filler, needle.hidden, needle.question, length, depth), needle
        )
        for length in sorted(set(lengths), reverse=True)
        for depth in sorted(set(depths), reverse=True)
        for trial, needle in enumerate(needles)
    }


def _make_needle(tokenize: Tokenize, source: random.Random) -> _Needle:
    fact = f"The secret number of the {source.choice(_WORDS)} is"
    number = str(source.randrange(10_000, 100_000))
    hidden = tokenize(f"\n{fact} {number}.\n", add_special_tokens=False)

    def tokenize_end(text: str, **_options: bool) -> list[int]:
        return tokenize(text, add_special_tokens=False)

    question, answer = split_tokens(tokenize_end, f"\n{fact}", f" {number}")
    return _Needle(hidden, question, answer, number)


def _item(prompt: list[int], needle: _Needle) -> Item:
    number = re.compile(rf"(?<!\d){needle.number}(?!\d)")
    most = len(needle.answer) + _SPARE_TOKENS
    greedy = SamplingParams(temperature=0, max_tokens=most)

    def score(answers: Answers) -> dict[str, float]:
        said, forced = answers
        return {
            "found": float(number.search(said.text) is not None),
            "logprob": log_likelihood(forced) / len(needle.answer),
        }

    return Item(((prompt, greedy), force(prompt, needle.answer)), score)


def _cell(scores: Scores, place: Place) -> RetrievalCell:
    length, depth = place
    of_cell = [score for name, score in scores.items() if name.startswith(f"{length}/{depth}/")]
    return RetrievalCell(
        length=length,
        depth=depth,
        found=_mean([score["found"] for score in of_cell]),
        logprob=_mean([score["logprob"] for score in of_cell]),
    )


def _figures(cells: tuple[RetrievalCell, ...], base: tuple[RetrievalCell, ...]) -> RetrievalFigures:
    return RetrievalFigures(
        cells=cells,
        found=_mean([cell.found for cell in cells]),
        found_base=_mean([cell.found for cell in base]),
        logprob=_mean([cell.logprob for cell in cells]),
        logprob_base=_mean([cell.logprob for cell in base]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
