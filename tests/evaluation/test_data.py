"""The user's text as prompts and as windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tightkv.config import EvaluationConfig
from tightkv.errors import RequestError
from tightkv.evaluation.data import cut_text
from tightkv.models import LoadedModel
from tiny_engine import loaded
from tiny_models import BOS, save_tiny_model

TEXT = "".join(chr(97 + (i * 7 + i // 26) % 26) for i in range(4000))
SIZES = EvaluationConfig(num_samples=2, max_seq_len=100, num_prompts=3, prompt_len=10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


def asked(text: str, answer: str | None = None) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return messages if answer is None else [*messages, {"role": "assistant", "content": answer}]


def test_a_long_text_is_prompts_and_continuations(model: LoadedModel) -> None:
    text = cut_text([TEXT], model, SIZES)
    assert [len(prompt.token_ids) for prompt in text.prompts] == [10, 10, 10]
    assert all(prompt.text in TEXT for prompt in text.prompts)
    windows = text.windows([(1,)] * 3, SIZES)  # answers to what goes on are not needed
    assert list(map(len, windows)) == [100, 100]
    first = text.prompts[0]
    assert windows[0] == [*first.token_ids, *first.continuation][:100]


def test_short_prompts_are_completed_by_answers(model: LoadedModel) -> None:
    config = replace(SIZES, num_prompts=10, prompt_len=50)
    text = cut_text(["one", "two", "three"], model, config)
    assert sorted(prompt.text for prompt in text.prompts) == ["one", "three", "two"]
    answers = [[200 + index] * 40 for index in range(3)]
    (window,) = text.windows(answers, config)
    expected = [
        token
        for prompt, answer in zip(text.prompts, answers, strict=True)
        for token in (*prompt.token_ids, *answer)
    ]
    assert window == expected[:100]


def test_conversations_are_asked_up_to_the_last_answer(model: LoadedModel) -> None:
    config = replace(SIZES, num_prompts=2)
    text = cut_text([asked("hello", "good day"), asked("how?")], model, config)
    by_text = {prompt.text: prompt for prompt in text.prompts}
    answered = by_text["user: hello\nassistant: "]
    assert bytes(answered.continuation).decode("latin-1").replace("\xc4", "") != ""
    assert BOS not in answered.token_ids
    assert by_text["user: how?\nassistant: "].continuation == ()


def test_the_seed_decides(model: LoadedModel) -> None:
    assert cut_text([TEXT], model, SIZES) == cut_text([TEXT], model, SIZES)
    assert cut_text([TEXT], model, replace(SIZES, seed=1)) != cut_text([TEXT], model, SIZES)


def test_too_little_text(model: LoadedModel) -> None:
    with pytest.raises(RequestError, match="has no text"):
        cut_text([], model, SIZES)
    with pytest.raises(RequestError, match="give at least 64"):
        cut_text(["one"], model, SIZES).windows([[1] * 10], SIZES)
    with pytest.raises(RequestError, match="512 positions"):
        cut_text([TEXT], model, replace(SIZES, max_seq_len=1000))
