"""Needle in a haystack: how prompts are built, and what is counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tightkv.calibration.progress import no_progress
from tightkv.config import EngineConfig
from tightkv.errors import PromptTooLongError, RequestError
from tightkv.evaluation import retrieval
from tightkv.evaluation.arms import Arms, parse_arm
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.retrieval import build_prompt, measure_retrieval
from tightkv.models import LoadedModel
from tiny_engine import loaded
from tiny_models import save_tiny_model

FILLER = list(range(60, 90))

BASE = replace(parse_arm("auto"), name="base")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


def make_arms(model: LoadedModel, *names: str, max_model_len: int = 300) -> Arms:
    config = EngineConfig.from_options(
        {"max_model_len": max_model_len, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    )
    return Arms.make(config, model, BASE, [parse_arm(name) for name in names], 640)


def text_of(model: LoadedModel, token_ids: Sequence[int] | None) -> str:
    return str(model.tokenizer.decode(list(token_ids or ())))


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0.0, [1, 70, 71, 5, 6, 7, 5, 6, 7, 5, 90]),
        (0.5, [1, 5, 6, 7, 5, 70, 71, 6, 7, 5, 90]),
        (1.0, [1, 5, 6, 7, 5, 6, 7, 5, 70, 71, 90]),
    ],
)
def test_prompts(depth: float, expected: list[int]) -> None:
    assert build_prompt([1], [5, 6, 7], [70, 71], [90], 11, depth) == expected


def test_prompts_that_cannot_be() -> None:
    with pytest.raises(RequestError, match="cannot hide a sentence of 2"):
        build_prompt([1], FILLER, [70, 71], [90], 4, 0.5)
    with pytest.raises(RequestError, match="some text"):
        build_prompt([], [], [70, 71], [90], 40, 0.5)


def test_each_prompt_has_its_length_and_its_sentence(model: LoadedModel) -> None:
    tokenize = make_arms(model).base.engine.tokenize
    items = retrieval._items(tokenize, FILLER, [200, 250], [0.0, 1.0], 3, seed=1)
    # The longest with the sentence at its end first: the others share its beginning.
    assert list(items)[:4] == ["250/1.0/0", "250/1.0/1", "250/1.0/2", "250/0.0/0"]
    numbers = set()
    for name, item in items.items():
        (prompt, greedy), (same, forced) = item.requests
        assert len(prompt) == int(name.split("/")[0])
        assert prompt == same
        text = text_of(model, prompt)
        found = re.search(r"The secret number of the (\w+) is (\d{5})\.\n", text)
        assert found is not None
        assert text.endswith(f"\nThe secret number of the {found[1]} is")
        assert text_of(model, forced.forced_token_ids) == f" {found[2]}"
        assert greedy.is_greedy
        numbers.add(found[2])
    assert len(numbers) == 3


def test_the_number_alone_counts(model: LoadedModel) -> None:
    tokenize = make_arms(model).base.engine.tokenize
    item = retrieval._items(tokenize, FILLER, [200], [0.5], 1, seed=0)["200/0.5/0"]
    number = text_of(model, item.requests[1][1].forced_token_ids).strip()

    class Said:
        def __init__(self, text: str, cumulative_logprob: float = -12.0) -> None:
            self.text = text
            self.cumulative_logprob = cumulative_logprob

    for text, found in ((f" {number}.", 1), (f"{number}1", 0), ("12", 0), ("", 0)):
        scores = item.score([Said(text), Said("")])  # type: ignore[list-item]
        assert scores == {"found": found, "logprob": -2.0}  # six tokens: bytes


def test_figures(tmp_path: Path, model: LoadedModel) -> None:
    arms = make_arms(model, "auto", "fp8_e5m2")
    journal = Journal(tmp_path / "journal", "run")
    base, figures = measure_retrieval(
        arms, FILLER, [200, 160], [1.0, 0.0, 0.5], 2, 0, journal, no_progress
    )
    places = [(cell.length, cell.depth) for cell in base]
    assert places == [(length, depth) for length in (160, 200) for depth in (0.0, 0.5, 1.0)]
    assert figures["auto"].cells == base
    other = figures["fp8_e5m2"]
    assert (
        other.logprob_base
        == figures["auto"].logprob
        == pytest.approx(sum(cell.logprob for cell in base) / 6)
    )
    assert other.logprob != other.logprob_base
    assert other.found_base == sum(cell.found for cell in base) / 6
    assert arms.base.engine.stats.prefix_cache_hits > 0
    # What is journaled is not asked again.
    again = make_arms(model, "auto", "fp8_e5m2")
    resumed = Journal(tmp_path / "journal", "run")
    assert measure_retrieval(
        again, FILLER, [200, 160], [1.0, 0.0, 0.5], 2, 0, resumed, no_progress
    ) == (base, figures)
    assert again.base.engine.stats.num_steps == 0


def test_what_cannot_be_had_is_refused(model: LoadedModel) -> None:
    arms = make_arms(model, "int8")
    journal = Journal(None, "")
    with pytest.raises(PromptTooLongError, match="300 is the most here"):
        measure_retrieval(arms, FILLER, [299], [0.5], 1, 0, journal, no_progress)
    with pytest.raises(RequestError, match="depths from 0 to 1"):
        measure_retrieval(arms, FILLER, [200], [1.5], 1, 0, journal, no_progress)
    with pytest.raises(RequestError, match="at least one trial"):
        measure_retrieval(arms, FILLER, [200], [0.5], 0, 0, journal, no_progress)
    with pytest.raises(RequestError, match="cannot hide"):
        measure_retrieval(arms, FILLER, [50], [0.5], 1, 0, journal, no_progress)
    assert arms.base.engine.stats.num_steps == 0
