"""Answers of each arm to the same prompts, against the baseline's."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tightkv.calibration.progress import Progress
from tightkv.engine.outputs import FinishReason, RequestOutput
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import PromptTooLongError, RequestError
from tightkv.evaluation.arms import Arm, Arms
from tightkv.evaluation.data import Prompt
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.report import AnswerExample, GenerationFigures
from tightkv.evaluation.text_metrics import (
    RougeScores,
    bleu,
    distinct_n,
    first_divergence,
    rouge,
)
from tightkv.metrics.repetition import has_repetition_loop

__all__ = ["Answer", "compare_answers", "generate_answers", "measure_generation"]

_STAGE = "answers"
_MAX_EXAMPLES = 5

# Shorter than where a server counts loops: answers here are short, and what is taken for a loop
# and is none is counted in the baseline's answers as well.
_LOOP_TOKENS, _LOOP_PERIODS = 32, 3


@dataclass(frozen=True, slots=True)
class Answer:
    """What an arm made of a prompt.

    Attributes:
        token_ids: with the end-of-sequence token, if it ended by itself.
        text: without special tokens.
        finish_reason: "stop" if it ended by itself, "length" if it was cut.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


def measure_generation(
    arms: Arms,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    journal: Journal,
    progress: Progress,
) -> dict[str, GenerationFigures]:
    """Let every arm answer, and compare with the baseline's answers.

    Args:
        arms: the baseline and what is compared with it.
        prompts: what is answered; at least one.
        params: as for `generate_answers`.
        journal: keeps each answer.
        progress: told of each answer, of all arms together.

    Returns:
        Figures by the name of each of `arms.others`.

    Raises:
        RequestError: if there are no prompts, or as `generate_answers`, before any arm runs.
        EngineError: if a request failed.
    """
    if not prompts:
        raise RequestError("There are no prompts to answer: give at least one.")
    for arm in arms:
        _check_prompts(arm, prompts, params)
    total = len(prompts) * (1 + len(arms.others))
    answers: list[list[Answer]] = []
    for arm in arms:
        before = len(prompts) * len(answers)
        answers.append(
            generate_answers(arm, prompts, params, journal, _shifted(progress, before, total))
        )
    base, *others = answers
    return {
        arm.name: compare_answers(prompts, base, of, params.temperature)
        for arm, of in zip(arms.others, others, strict=True)
    }


def generate_answers(
    arm: Arm,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    journal: Journal,
    progress: Progress,
) -> list[Answer]:
    """Answers of one arm; each is in the journal as soon as it is finished.

    Args:
        arm: who answers.
        prompts: what is answered.
        params: for all of them. Prompt i has the seed `params.seed` + i, in every arm, so that
            all arms draw the same random numbers; None counts as 0.
        journal: keeps each answer, and has those of an interrupted run.
        progress: told of each answer.

    Returns:
        One answer per prompt, in their order.

    Raises:
        PromptTooLongError: if a prompt and its answer do not fit, before anything runs.
        RequestError: for more than one completion per prompt.
        EngineError: if a request failed.
    """
    _check_prompts(arm, prompts, params)
    asked = [(prompt.token_ids, _for_prompt(params, index)) for index, prompt in enumerate(prompts)]
    keys = [_key(arm.name, index, *of) for index, of in enumerate(asked)]
    missing = [index for index, key in enumerate(keys) if not journal.has(key)]
    done = len(prompts) - len(missing)
    progress(_STAGE, done, len(prompts))

    def on_finished(position: int, output: RequestOutput) -> None:
        nonlocal done
        journal.once(keys[missing[position]], lambda: asdict(_answer(output)))
        done += 1
        progress(_STAGE, done, len(prompts))

    arm.generate(
        [asked[index][0] for index in missing], [asked[index][1] for index in missing], on_finished
    )
    # All of them as the journal gives them back, so that a resumed run has the same.
    return [_read_answer(journal, key) for key in keys]


def compare_answers(
    prompts: Sequence[Prompt],
    base: Sequence[Answer],
    answers: Sequence[Answer],
    temperature: float,
) -> GenerationFigures:
    """Figures of one arm's answers.

    Args:
        prompts: what was asked; at least one.
        base: the baseline's answers, one per prompt.
        answers: the arm's.
        temperature: at which they were made, for the report.
    """
    pairs = list(zip(answers, base, strict=True))
    divergences = [first_divergence(one.token_ids, other.token_ids) for one, other in pairs]
    differing = [divergence for divergence in divergences if divergence is not None]
    scores = [rouge(one.text, other.text) for one, other in pairs]
    return GenerationFigures(
        num_answers=len(pairs),
        temperature=temperature,
        exact_match=divergences.count(None) / len(pairs),
        median_first_divergence=statistics.median(differing) if differing else None,
        bleu=bleu([answer.text for answer in answers], [answer.text for answer in base]),
        rouge1=statistics.fmean(score.rouge1 for score in scores),
        rouge2=statistics.fmean(score.rouge2 for score in scores),
        rouge_l=statistics.fmean(score.rouge_l for score in scores),
        length_ratio=_num_tokens(answers) / _num_tokens(base),
        loops=_share(map(_loops, answers)),
        loops_base=_share(map(_loops, base)),
        distinct_2=statistics.fmean(distinct_n(answer.token_ids, 2) for answer in answers),
        distinct_2_base=statistics.fmean(distinct_n(answer.token_ids, 2) for answer in base),
        early_eos=_share(_ends_early(one, other) for one, other in pairs),
        missing_eos=_share(_misses_its_end(one, other) for one, other in pairs),
        examples=_examples(prompts, pairs, divergences, scores),
    )


def _check_prompts(arm: Arm, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    if params.n != 1:
        raise RequestError(f"Answers are compared one by one, but n is {params.n}: leave it at 1.")
    limit = arm.engine.plan.max_model_len
    answer = 1 if params.max_tokens is None else params.max_tokens
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt.token_ids) + answer > limit:
            raise PromptTooLongError(
                f"Prompt {number} has {len(prompt.token_ids)} tokens and its answer may have "
                f"{answer}, but together they may have {limit}: shorten the prompt, lower "
                "max_tokens, or raise --max-model-len."
            )


def _for_prompt(params: SamplingParams, index: int) -> SamplingParams:
    """The same for each arm; with text, which is what is compared."""
    return replace(params, seed=((params.seed or 0) + index) % 2**64, detokenize=True)


def _key(arm: str, index: int, token_ids: Sequence[int], params: SamplingParams) -> str:
    """Names the answer in the journal; another prompt or other parameters have another name."""
    digest = hashlib.sha256(repr((tuple(token_ids), params)).encode()).hexdigest()[:12]
    return f"generation/{params.temperature:g}/{arm}/{index}/{digest}"


def _answer(output: RequestOutput) -> Answer:
    completion = output.outputs[0]
    assert completion.finish_reason is not None  # it is finished
    return Answer(completion.token_ids, completion.text, completion.finish_reason)


def _read_answer(journal: Journal, key: str) -> Answer:
    record: dict[str, Any] = journal.once(key, dict)  # it is there: nothing is made
    return Answer(tuple(record["token_ids"]), record["text"], record["finish_reason"])


def _shifted(progress: Progress, before: int, total: int) -> Progress:
    """Tells how far all arms together are, of which `before` answers are there."""
    return lambda stage, done, _: progress(stage, before + done, total)


def _num_tokens(answers: Iterable[Answer]) -> int:
    return sum(len(answer.token_ids) for answer in answers)


def _share(flags: Iterable[bool]) -> float:
    return statistics.fmean(map(float, flags))


def _loops(answer: Answer) -> bool:
    return has_repetition_loop(
        answer.token_ids, least_tokens=_LOOP_TOKENS, least_periods=_LOOP_PERIODS
    )


def _ends_early(answer: Answer, base: Answer) -> bool:
    return answer.finish_reason == "stop" and len(answer.token_ids) < len(base.token_ids)


def _misses_its_end(answer: Answer, base: Answer) -> bool:
    return base.finish_reason == "stop" and answer.finish_reason != "stop"


def _examples(
    prompts: Sequence[Prompt],
    pairs: Sequence[tuple[Answer, Answer]],
    divergences: Sequence[int | None],
    scores: Sequence[RougeScores],
) -> tuple[AnswerExample, ...]:
    """Those that loop where the baseline's does not; then by ROUGE-L; then which diverge first."""
    examples = [
        (
            _loops(base) or not _loops(answer),
            AnswerExample(
                prompt=prompt.text,
                base=base.text,
                answer=answer.text,
                first_divergence=divergence,
                rouge_l=score.rouge_l,
            ),
        )
        for prompt, (answer, base), divergence, score in zip(
            prompts, pairs, divergences, scores, strict=True
        )
        # Tokens may differ where the text does not; nobody would see why it is shown.
        if divergence is not None and answer.text != base.text
    ]
    examples.sort(key=lambda one: (one[0], one[1].rouge_l, one[1].first_divergence))
    return tuple(example for _, example in examples[:_MAX_EXAMPLES])
