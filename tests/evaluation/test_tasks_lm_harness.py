"""lm-evaluation-harness on an arm gives the scores of transformers' own logits."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tightkv.calibration.progress import no_progress
from tightkv.config import EngineConfig, EvaluationConfig
from tightkv.errors import PromptTooLongError, RequestError
from tightkv.evaluation.arms import Arms, parse_arm
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.tasks import parse_task, run_task
from tightkv.evaluation.tasks.harness_model import harness_model
from tightkv.evaluation.tasks.lm_harness import _score
from tiny_engine import loaded
from tiny_models import BOS, save_tiny_model, tiny_model, tiny_tokenizer

QUESTIONS: list[dict[str, Any]] = [
    {"question": "The sky is", "choices": [" blue", " green", " a cat"], "answer": 0},
    {"question": "Two and two make", "choices": [" five", " four"], "answer": 1},
    {"question": "Water is", "choices": [" dry", " wet", " loud", " square"], "answer": 1},
    {"question": "Fire is ", "choices": ["hot", "cold"], "answer": 0},
]
TEXT = "The lighthouse stood on the rock, and the sea went round it. " * 4

TASK = """
task: local_{kind}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: {output}
target_delimiter: ""
doc_to_text: question
doc_to_target: {target}
metric_list:
  - metric: {metric}
"""
BASE = replace(parse_arm("auto"), name="base")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def arms(folder: Path) -> Arms:
    config = EngineConfig.from_options(
        {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    )
    others = [parse_arm(name) for name in ("auto", "fp8_e5m2")]
    return Arms.make(config, loaded(folder), BASE, others, 512)


class Request:
    """What lm-eval hands to a model."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def logprobs_of(ids: Sequence[int]) -> torch.Tensor:
    """`[len(ids), vocab]` by transformers in float32."""
    with torch.no_grad():
        logits: torch.Tensor = tiny_model("llama")(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


def expected_score(context: str, continuation: str) -> tuple[float, bool]:
    tokenizer = tiny_tokenizer()
    before = len(tokenizer(context.rstrip()).input_ids)
    whole = tokenizer(context + continuation).input_ids
    rows = logprobs_of(whole)
    places = range(before, len(whole))
    total = sum(rows[i - 1, whole[i]].item() for i in places)
    return total, all(int(rows[i - 1].argmax()) == whole[i] for i in places)


def model_of(arms: Arms) -> Any:
    pytest.importorskip("lm_eval")
    return harness_model(arms.base, "lm_eval:x", "stage", no_progress, None)


@pytest.mark.slow
def test_log_likelihoods(arms: Arms) -> None:
    pairs = [(one["question"], choice) for one in QUESTIONS for choice in one["choices"]]
    found = model_of(arms).loglikelihood([Request(*pair) for pair in pairs])
    expected = [expected_score(*pair) for pair in pairs]
    assert [score for score, _ in found] == pytest.approx([e for e, _ in expected], abs=1e-3)
    assert [is_greedy for _, is_greedy in found] == [e for _, e in expected]


@pytest.mark.slow
def test_the_greedy_continuation_is_known_as_such(arms: Arms) -> None:
    tokenizer = tiny_tokenizer()
    best = [
        (
            context,
            str(tokenizer.decode([int(logprobs_of(tokenizer(context).input_ids)[-1].argmax())])),
        )
        for context in ("The sky is", "Two and two make", "Fire is", "Water is", "What is", "One")
    ]
    # A byte that is no character cannot be asked for as text.
    pairs = [(context, end) for context, end in best if "\ufffd" not in end]
    assert pairs
    assert all(
        found for _, found in model_of(arms).loglikelihood([Request(*pair) for pair in pairs])
    )
    others = [Request(context, "~") for context, end in pairs if end != "~"]
    assert not any(found for _, found in model_of(arms).loglikelihood(others))


@pytest.mark.slow
def test_rolling_log_likelihoods(arms: Arms) -> None:
    ids = tiny_tokenizer()(TEXT).input_ids
    whole = [BOS, *ids]
    short = [BOS, *ids[:100]]
    found = model_of(arms).loglikelihood_rolling([Request(TEXT[:100]), Request(TEXT), Request("")])
    rows = logprobs_of(short)
    expected = sum(rows[i, token].item() for i, token in enumerate(short[1:]))
    assert found[0] == pytest.approx(expected, abs=1e-3)
    # 126 tokens are a window; the rest is predicted with as many tokens before it.
    first = logprobs_of(whole[:126])
    expected = sum(first[i, token].item() for i, token in enumerate(whole[1:127]))
    last = logprobs_of(whole[-127:-1])
    second = sum(last[-1 - i, whole[-1 - i]].item() for i in range(len(whole) - 127))
    assert found[1] == pytest.approx(expected + second, abs=1e-3)
    assert found[2] == 0


@pytest.mark.slow
def test_generation_ends_where_the_task_says(arms: Arms) -> None:
    model = model_of(arms)
    request = ("The sky is", {"until": [], "max_gen_toks": 12, "do_sample": False})
    (text,) = model.generate_until([Request(*request)])
    assert text
    stop = text[len(text) // 2]
    (cut,) = model.generate_until([Request("The sky is", {"until": stop, "max_gen_toks": 12})])
    assert cut == text[: text.index(stop)]
    with pytest.raises(RequestError, match="num_beams=4"):
        model.generate_until([Request("The sky is", {"num_beams": 4})])
    with pytest.raises(PromptTooLongError, match="raise --max-model-len"):
        model.generate_until([Request("x" * 100, {"until": []})])


def write_task(tmp_path: Path, kind: str, output: str, target: str, metric: str) -> Path:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    tasks = tmp_path / "tasks"
    tasks.mkdir(exist_ok=True)
    file = tasks / f"local_{kind}.yaml"
    text = TASK.format(kind=kind, path=data, output=output, target=target, metric=metric)
    if output == "multiple_choice":
        text += "doc_to_choice: choices\n"
    file.write_text(text)
    return file


@pytest.mark.slow
def test_a_local_task(
    tmp_path: Path, arms: Arms, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    file = write_task(tmp_path, "choices", "multiple_choice", "answer", "acc")
    task = parse_task(f"lm_eval:{file}", EvaluationConfig())
    told: list[tuple[str, int, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        told.append((stage, done, total))

    journal = Journal(tmp_path / "journal", "run")
    figures = run_task(task, arms, journal, progress)
    right = 0
    for question in QUESTIONS:
        scores = [expected_score(question["question"], c)[0] for c in question["choices"]]
        right += scores.index(max(scores)) == question["answer"]
    (acc,) = figures["auto"]
    assert acc.metric == "acc"
    assert acc.num_items == 4
    assert acc.score == acc.score_base == right / 4
    assert told[-1] == ("task/lm_eval:local_choices/fp8_e5m2", 4, 4)
    assert "it/s" not in capfd.readouterr().err
    steps = arms.base.engine.stats.num_steps
    assert run_task(task, arms, Journal(tmp_path / "journal", "run"), progress) == figures
    assert arms.base.engine.stats.num_steps == steps
    # A folder of tasks, and some items of each.
    limited = parse_task(f"lm_eval:{file.parent}", EvaluationConfig(task_limit=3, seed=1))
    assert run_task(limited, arms, Journal(None, ""), no_progress)["auto"][0].num_items == 3
    assert limited.sha256 != task.sha256


@pytest.mark.slow
def test_a_task_that_is_none() -> None:
    pytest.importorskip("lm_eval")
    with pytest.raises(RequestError, match="has no task 'gsm9k'"):
        parse_task("lm_eval:gsm9k", EvaluationConfig())


@pytest.mark.slow
def test_a_task_without_its_data(
    tmp_path: Path, arms: Arms, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    file = write_task(tmp_path, "broken", "multiple_choice", "answer", "acc")
    (tmp_path / "data.jsonl").unlink()
    task = parse_task(f"lm_eval:{file}", EvaluationConfig())
    with pytest.raises(
        RequestError, match=r"lm-evaluation-harness cannot run lm_eval:local_broken"
    ):
        run_task(task, arms, Journal(None, ""), no_progress)


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(RequestError, match=r"install tightkv\[lm-eval\]"):
        parse_task("lm_eval:gsm8k", EvaluationConfig())


@pytest.mark.parametrize(
    ("metric", "value", "higher", "expected"),
    [
        ("acc", 1, True, 1.0),
        ("acc", True, None, 1.0),
        ("f1", 0.25, True, 0.25),
        ("ter", 3.0, False, None),
        ("perplexity", -4.5, False, -4.5),
        ("word_perplexity", (-30.0, 10), False, -3.0),
        ("word_perplexity", (0.0, 0), False, None),
        ("bleu", ("a", "b", "c"), True, None),
        ("acc", float("nan"), True, None),
    ],
)
def test_scores_of_items(
    metric: str, value: Any, higher: bool | None, expected: float | None
) -> None:
    assert _score(metric, value, higher) == expected
