"""Items: what is asked of the engine, how the answers are scored, and asking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tightkv.calibration.progress import Progress
from tightkv.engine.outputs import CompletionOutput, RequestOutput
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import PromptTooLongError
from tightkv.evaluation.arms import Arm, Arms
from tightkv.evaluation.journal import Journal

__all__ = [
    "Answers",
    "Item",
    "Request",
    "Scores",
    "answer_all",
    "num_tokens",
    "score_all",
]

Request = tuple[Sequence[int], SamplingParams]
"""A prompt's token ids, and how to answer it."""

Answers = Sequence[CompletionOutput]
"""To the requests of an item, in their order."""

Scores = Mapping[str, Mapping[str, float]]
"""Per item, by metric."""

_MOST_TOGETHER = 256  # so that the requests of a long task are not all held at once


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to be answered.

    Attributes:
        requests: at least one.
        score: from the answers to scores by metric.
    """

    requests: Sequence[Request]
    score: Callable[[Answers], dict[str, float]]


def score_all(
    items: Mapping[str, Item], arms: Arms, journal: Journal, stage: str, progress: Progress
) -> dict[str, Scores]:
    """Scores of all items in all arms; what the journal knows is not asked again.

    Args:
        items: by name.
        arms: each of which answers.
        journal: has each item under "{stage}/{arm}/{name}".
        stage: told to `progress`, too.
        progress: called after each item.

    Returns:
        Scores by arm.

    Raises:
        PromptTooLongError: if an item does not fit; before anything runs.
        EngineError: if a request failed.
    """
    _check_fit(items, arms, stage)
    total = len(items) * (1 + len(arms.others))
    scores: dict[str, Scores] = {}
    for arm in arms:
        before = len(items) * len(scores)

        def advance(done: int, before: int = before) -> None:
            progress(stage, before + done, total)

        scores[arm.name] = _score_in(arm, items, journal, f"{stage}/{arm.name}", advance)
    return scores


def _score_in(
    arm: Arm,
    items: Mapping[str, Item],
    journal: Journal,
    prefix: str,
    advance: Callable[[int], None],
) -> Scores:
    keys = {name: f"{prefix}/{name}" for name in items}
    waiting = {name: item.requests for name, item in items.items() if not journal.has(keys[name])}
    num_done = len(items) - len(waiting)
    advance(num_done)

    def on_answered(name: str, answers: Answers) -> None:
        nonlocal num_done
        journal.once(keys[name], lambda: items[name].score(answers))
        num_done += 1
        advance(num_done)

    answer_all(waiting, arm, on_answered)
    return {name: journal.once(key, dict[str, float]) for name, key in keys.items()}


def answer_all(
    requests: Mapping[str, Sequence[Request]],
    arm: Arm,
    on_answered: Callable[[str, Answers], None],
) -> None:
    """Answer the requests of all items.

    An item's later requests come after its first, and find its prompt in the prefix cache.

    Args:
        requests: at least one per item.
        arm: which answers.
        on_answered: given an item's name and its answers, as soon as it has all of them.

    Raises:
        EngineError: if a request failed.
    """
    for names in _groups(requests, arm):
        _answer_group({name: requests[name] for name in names}, arm, on_answered)


def num_tokens(request: Request) -> int:
    """Of the prompt, and of the answer at its longest."""
    prompt, params = request
    forced = params.forced_token_ids
    return len(prompt) + (len(forced) if forced is not None else params.max_tokens or 1)


def _check_fit(items: Mapping[str, Item], arms: Arms, stage: str) -> None:
    limit = min(arm.engine.plan.max_model_len for arm in arms)
    for name, item in items.items():
        needed = max(map(num_tokens, item.requests))
        if needed > limit:
            raise PromptTooLongError(
                f"{stage}: item {name} needs {needed:,} tokens with its answer, and {limit:,} is "
                "the most here: leave it out, give shorter examples, or raise --max-model-len."
            )


def _groups(requests: Mapping[str, Sequence[Request]], arm: Arm) -> Iterator[list[str]]:
    """Names of items that are asked together."""
    names = list(requests)
    size = _MOST_TOGETHER
    if any(len(of_item) > 1 for of_item in requests.values()):
        # As many as the pool holds, or the first would be gone before they are needed again.
        longest = max(num_tokens(of_item[0]) for of_item in requests.values())
        size = min(arm.engine.config.scheduler.max_num_seqs, arm.engine.plan.num_tokens // longest)
    size = max(size, 1)
    for start in range(0, len(names), size):
        yield names[start : start + size]


def _answer_group(
    requests: Mapping[str, Sequence[Request]],
    arm: Arm,
    on_answered: Callable[[str, Answers], None],
) -> None:
    answers: dict[str, dict[int, CompletionOutput]] = {name: {} for name in requests}

    def answer(places: Sequence[tuple[str, int]]) -> None:
        def on_finished(at: int, output: RequestOutput) -> None:
            name, index = places[at]
            known = answers[name]
            known[index] = output.outputs[0]
            if len(known) == len(requests[name]):
                on_answered(name, [known[i] for i in range(len(known))])

        asked = [requests[name][index] for name, index in places]
        arm.generate([prompt for prompt, _ in asked], [params for _, params in asked], on_finished)

    answer([(name, 0) for name in requests])
    answer([(name, index) for name in requests for index in range(1, len(requests[name]))])
