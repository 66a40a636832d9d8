"""Answers of arms: what the figures say of them, and that an interrupted run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightkv import SamplingParams
from tightkv.calibration.progress import no_progress
from tightkv.config import EngineConfig
from tightkv.engine.outputs import FinishReason
from tightkv.errors import PromptTooLongError, RequestError
from tightkv.evaluation.arms import Arms, parse_arm
from tightkv.evaluation.data import Prompt
from tightkv.evaluation.generation import (
    Answer,
    compare_answers,
    generate_answers,
    measure_generation,
)
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.report import GenerationFigures
from tiny_engine import loaded, prompts, tiny_llm
from tiny_models import save_tiny_model

NUM_PROMPTS = 6
MAX_MODEL_LEN = 128
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=1.0, seed=40, max_tokens=24)
LOOP = (1, 2, 3) * 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def make_arms(folder: Path, *others: str, max_model_len: int = MAX_MODEL_LEN) -> Arms:
    options = {"max_model_len": max_model_len, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    config = EngineConfig.from_options(options)
    specs = [parse_arm(name) for name in others]
    return Arms.make(config, loaded(folder), parse_arm("auto"), specs, num_tokens=1024)


def asked(count: int = NUM_PROMPTS) -> list[Prompt]:
    return [Prompt(f"prompt {number}", tuple(ids)) for number, ids in enumerate(prompts(count, 30))]


def answer(
    text: str, reason: FinishReason = "stop", token_ids: tuple[int, ...] | None = None
) -> Answer:
    """Its tokens are its characters, unless given."""
    return Answer(tuple(map(ord, text)) if token_ids is None else token_ids, text, reason)


def figures_of(base: list[Answer], answers: list[Answer]) -> GenerationFigures:
    questions = [Prompt(f"prompt {index}", (index,)) for index in range(len(base))]
    return compare_answers(questions, base, answers, 0.0)


def test_figures_of_known_answers() -> None:
    base = [answer("the cat sat"), answer("a dog ran off"), answer("ok"), answer("x y", "length")]
    other = [answer("the cat sat"), answer("a dog"), answer("on", "length"), answer("x y z")]
    figures = figures_of(base, other)
    assert figures.num_answers == 4
    assert figures.temperature == 0
    assert figures.exact_match == 1 / 4
    assert figures.median_first_divergence == 3  # of 5, 1 and 3 equal characters
    assert figures.length_ratio == (11 + 5 + 2 + 5) / (11 + 13 + 2 + 3)
    # F1 by words: 1; 2 of 2 and 2 of 4; 0; 2 of 3 and 2 of 2.
    assert figures.rouge1 == figures.rouge_l == pytest.approx((1 + 2 / 3 + 0 + 4 / 5) / 4)
    assert figures.rouge2 == pytest.approx((1 + 1 / 2 + 0 + 2 / 3) / 4)
    assert 0 < figures.bleu < 100
    assert figures.early_eos == 1 / 4  # "a dog"
    assert figures.missing_eos == 1 / 4  # "on", cut
    assert figures.loops == figures.loops_base == 0
    assert figures.distinct_2 == pytest.approx((9 / 10 + 1 + 1 + 1) / 4)  # "at" comes twice


@pytest.mark.parametrize(
    ("base", "other", "early", "missing"),
    [
        (answer("a b c"), answer("a"), 1, 0),
        (answer("a b c", "length"), answer("a"), 1, 0),
        (answer("a"), answer("a b c"), 0, 0),
        (answer("a"), answer("a b c", "length"), 0, 1),
        (answer("a b c", "length"), answer("a c c", "length"), 0, 0),
        (answer("a b c", "length"), answer("a", "length"), 0, 0),
        (answer("a b c"), answer("a b c"), 0, 0),
    ],
)
def test_early_and_missing_ends(base: Answer, other: Answer, early: int, missing: int) -> None:
    figures = figures_of([base], [other])
    assert (figures.early_eos, figures.missing_eos) == (early, missing)


def test_examples_are_the_worst_first() -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    text = " ".join(words)
    base = [answer(text) for _ in words]
    other = [answer(" ".join(words[:count])) for count in range(1, 9)]
    examples = figures_of(base, other[::-1]).examples
    assert [example.answer for example in examples] == [one.text for one in other[:5]]
    assert [example.prompt for example in examples] == [
        f"prompt {index}" for index in range(7, 2, -1)
    ]
    assert examples[0].base == text
    assert examples[0].first_divergence == 3
    assert examples[0].rouge_l == pytest.approx(2 / 9)


def test_an_answer_that_loops_is_the_first_example() -> None:
    base = [answer("a b c d", token_ids=(1, 2, 3, 4))] * 2
    other = [answer("x y", token_ids=(9, 8)), answer("a b c d a b", "length", LOOP)]
    assert [example.answer for example in figures_of(base, other).examples] == [
        "a b c d a b",
        "x y",
    ]


def test_equal_answers() -> None:
    answers = [answer("the cat sat on the mat"), answer("Paris"), answer(""), answer("北京")]
    figures = figures_of(answers, answers)
    assert figures.exact_match == 1
    assert figures.median_first_divergence is None
    assert figures.bleu == 100
    assert figures.rouge1 == figures.rouge2 == figures.rouge_l == 1
    assert figures.length_ratio == 1
    assert figures.early_eos == figures.missing_eos == 0
    assert figures.examples == ()


def test_equal_texts_of_other_tokens_differ_but_are_no_example() -> None:
    figures = figures_of([answer("ab", token_ids=(1, 2))], [answer("ab", token_ids=(3,))])
    assert (figures.exact_match, figures.median_first_divergence) == (0, 0)
    assert (figures.bleu, figures.rouge_l) == (100, 1)
    assert figures.examples == ()


def test_loops_and_repetition() -> None:
    base = [answer("a b c", token_ids=(1, 2, 3, 4)), answer("d", token_ids=(1, 2, 3))]
    other = [answer("a b a b", "length", LOOP), answer("d", token_ids=(1, 2, 3))]
    figures = figures_of(base, other)
    assert (figures.loops, figures.loops_base) == (1 / 2, 0)
    assert figures.distinct_2 == pytest.approx((3 / 89 + 1) / 2)
    assert figures.distinct_2_base == 1
    assert figures.missing_eos == 1 / 2


@pytest.mark.parametrize(
    ("token_ids", "loops"),
    [
        (LOOP, True),
        (tuple(range(100, 200)) + tuple(range(20)) * 3, True),
        (tuple(range(100, 200)) + tuple(range(20)) * 2, False),
        (tuple(range(100, 200)) + (7,) * 31, False),
        ((*LOOP, 257), False),
    ],
    ids=["phrase", "sentence three times", "sentence twice", "row of dashes", "it ends"],
)
def test_what_is_a_loop(token_ids: tuple[int, ...], loops: bool) -> None:
    figures = figures_of([answer("a")], [answer("b", "length", token_ids)])
    assert figures.loops == loops


def test_the_baseline_against_itself_is_equal(folder: Path) -> None:
    arms = make_arms(folder, "float32")
    for params in (GREEDY, SAMPLED):
        figures = measure_generation(arms, asked(), params, Journal(None, ""), no_progress)
        of = figures["float32"]
        assert (of.exact_match, of.bleu, of.rouge_l, of.length_ratio) == (1, 100, 1, 1)
        assert of.temperature == params.temperature
        assert of.examples == ()


def test_a_coarse_cache_is_seen(folder: Path) -> None:
    arms = make_arms(folder, "int8", "fp8_e5m2")
    figures = measure_generation(arms, asked(), GREEDY, Journal(None, ""), no_progress)
    fine, coarse = figures["int8"], figures["fp8_e5m2"]
    assert coarse.exact_match < fine.exact_match
    assert coarse.exact_match < 1
    assert coarse.rouge_l < 1
    assert coarse.bleu < 100
    assert coarse.median_first_divergence is not None
    assert 0 < len(coarse.examples) <= 5
    for example in coarse.examples:
        assert example.prompt.startswith("prompt ")
        assert example.base != example.answer


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_run_gives_the_same_figures(folder: Path, params: SamplingParams) -> None:
    first, second = (
        measure_generation(
            make_arms(folder, "int8"), asked(), params, Journal(None, ""), no_progress
        )
        for _ in range(2)
    )
    assert first == second


def test_each_prompt_has_a_seed_of_its_own(folder: Path) -> None:
    arms = make_arms(folder)
    same = [asked()[0]] * 3
    answers = generate_answers(arms.base, same, SAMPLED, Journal(None, ""), no_progress)
    assert len({one.token_ids for one in answers}) == 3
    for index, one in enumerate(answers):
        params = SamplingParams(temperature=1.0, seed=40 + index, max_tokens=24)
        (output,) = tiny_llm(folder).generate(list(same[0].token_ids), params)
        assert one.token_ids == output.outputs[0].token_ids
        assert one.text == output.outputs[0].text


def test_answers_say_how_they_ended(folder: Path) -> None:
    arms = make_arms(folder)
    cut = generate_answers(arms.base, asked(1), GREEDY, Journal(None, ""), no_progress)[0]
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 24)
    stop = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[cut.token_ids[5]])
    ended = generate_answers(arms.base, asked(1), stop, Journal(None, ""), no_progress)[0]
    assert ended.finish_reason == "stop"
    assert ended.token_ids == cut.token_ids[: cut.token_ids.index(cut.token_ids[5]) + 1]


class Interruption:
    """Counts answers, and is Ctrl-C at one of them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.told: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.told.append((stage, done, total))
        if done == self.at:
            raise KeyboardInterrupt


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) - 1


@pytest.mark.parametrize(("params", "at"), [(GREEDY, 1), (SAMPLED, 5), (GREEDY, 9)])
def test_an_interrupted_run_goes_on(
    folder: Path, tmp_path: Path, params: SamplingParams, at: int
) -> None:
    arms = make_arms(folder, "fp8_e5m2")
    whole = measure_generation(arms, asked(), params, Journal(None, ""), no_progress)
    path = tmp_path / "journal.jsonl"
    with pytest.raises(KeyboardInterrupt):
        measure_generation(arms, asked(), params, Journal(path, "run"), Interruption(at))
    assert num_lines(path) == at
    assert not any(arm.engine.has_unfinished_requests for arm in arms)

    arms = make_arms(folder, "fp8_e5m2")
    progress = Interruption(at=-1)
    resumed = measure_generation(arms, asked(), params, Journal(path, "run"), progress)
    assert resumed == whole
    assert num_lines(path) == 2 * NUM_PROMPTS
    assert progress.told[-1] == ("answers", 12, 12)
    num_tokens = sum(arm.engine.stats.generation_tokens for arm in arms)
    assert num_tokens <= 24 * (2 * NUM_PROMPTS - at)

    again = measure_generation(arms, asked(), params, Journal(path, "run"), no_progress)
    assert again == whole
    assert sum(arm.engine.stats.generation_tokens for arm in arms) == num_tokens


def test_an_answer_is_not_taken_for_that_of_another_question(folder: Path) -> None:
    arms, journal = make_arms(folder), Journal(None, "")
    first = generate_answers(arms.base, asked(), GREEDY, journal, no_progress)
    assert generate_answers(arms.base, asked()[::-1], GREEDY, journal, no_progress) == first[::-1]
    shorter = SamplingParams(temperature=0, max_tokens=7)
    cut = generate_answers(arms.base, asked(), shorter, journal, no_progress)
    assert [one.token_ids for one in cut] == [one.token_ids[:7] for one in first]


def test_progress_is_told_answer_by_answer(folder: Path) -> None:
    progress = Interruption(at=-1)
    measure_generation(make_arms(folder, "int8"), asked(), GREEDY, Journal(None, ""), progress)
    counts = [done for _, done, _ in progress.told]
    assert counts == sorted(counts)
    assert set(counts) == set(range(13))
    assert {total for _, _, total in progress.told} == {12}


@pytest.mark.parametrize("max_tokens", [24, None])
def test_a_prompt_that_is_too_long_is_refused_before_anything_runs(
    folder: Path, max_tokens: int | None
) -> None:
    arms, journal = make_arms(folder, "int8"), Journal(None, "")
    long = Prompt("long", (5,) * (MAX_MODEL_LEN - (max_tokens or 1) + 1))
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with pytest.raises(PromptTooLongError, match=rf"Prompt 3 has {len(long.token_ids)} tokens .*"):
        measure_generation(arms, [*asked(2), long], params, journal, no_progress)
    assert journal.num_results == 0
    assert not any(arm.engine.has_unfinished_requests for arm in arms)
    assert not any(arm.engine.stats.num_steps for arm in arms)
    fits = Prompt("fits", long.token_ids[1:])
    assert generate_answers(arms.base, [fits], params, journal, no_progress)


def test_all_arms_are_asked_before_the_first_one_runs(folder: Path) -> None:
    base, small = make_arms(folder).base, make_arms(folder, max_model_len=64).base
    with pytest.raises(PromptTooLongError, match="together they may have 64"):
        measure_generation(Arms(base, (small,)), asked(), GREEDY, Journal(None, ""), no_progress)
    assert base.engine.stats.num_steps == 0


def test_what_cannot_be_compared_is_refused(folder: Path) -> None:
    arms, journal = make_arms(folder), Journal(None, "")
    with pytest.raises(RequestError, match="no prompts"):
        measure_generation(arms, [], GREEDY, journal, no_progress)
    two = SamplingParams(temperature=1.0, n=2)
    with pytest.raises(RequestError, match="n is 2"):
        generate_answers(arms.base, asked(1), two, journal, no_progress)
    assert generate_answers(arms.base, [], GREEDY, journal, no_progress) == []
