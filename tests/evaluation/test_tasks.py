"""Tasks: how they are named and read, what is asked, how it is scored, and going on."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tightkv.calibration.progress import no_progress
from tightkv.config import EngineConfig, EvaluationConfig
from tightkv.errors import PromptTooLongError, RequestError
from tightkv.evaluation.arms import Arm, Arms, parse_arm
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.tasks import gsm8k, parse_task, parse_tasks, run_task
from tightkv.evaluation.tasks.gsm8k import score_answer
from tightkv.evaluation.tasks.records import choose
from tightkv.evaluation.tasks.task import ItemTask
from tightkv.models import LoadedModel
from tiny_engine import loaded
from tiny_models import save_tiny_model, tiny_model, tiny_tokenizer

CONFIG = EvaluationConfig()
PROBLEMS = [{"question": f"What is {i} + 1?", "answer": f"{i}+1\n#### {i + 1}"} for i in range(9)]
QUESTIONS = [
    {"question": "The sky is", "choices": ["blue", "green", "a cat"], "answer": 0},
    {"question": "Two and two make", "choices": ["five", "four"], "answer": "B"},
    {"question": "Water is", "choices": ["dry", "wet", "loud"], "answer": 1, "score": "text"},
    {"question": "Fire is", "choices": ["hot", "cold"], "answer": "a", "score": "text"},
]
PROGRAMS = [
    {"prompt": "def one():\n", "test": "def check(f):\n    pass\n", "entry_point": "one"},
    {"prompt": "def two():\n    pass\n", "test": "def check(f):\n    pass", "entry_point": "two"},
    {"prompt": "def one():\n    return 1\n# ", "test": "def check(f):\n    assert f() == 1"}
    | {"entry_point": "one"},
]
BASE = replace(parse_arm("auto"), name="base")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("models") / "llama"
    return loaded(save_tiny_model(folder, max_position_embeddings=1024))


def make_arms(model: LoadedModel, *names: str, **options: Any) -> Arms:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 256, **options}
    engine = EngineConfig.from_options({"max_model_len": 1024, **options})
    return Arms.make(engine, model, BASE, [parse_arm(name) for name in names], 4096)


def json_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))
    return path


def items_of(text: str, model: LoadedModel, config: EvaluationConfig = CONFIG) -> dict[str, Any]:
    task = parse_task(text, config)
    assert isinstance(task, ItemTask)
    return task.make_items(lambda t, **o: list(model.tokenizer(t, **o).input_ids))


def test_gsm8k_asks_as_lm_eval_does(tmp_path: Path, model: LoadedModel) -> None:
    path = json_lines(tmp_path / "problems.jsonl", PROBLEMS)
    items = items_of(f"gsm8k={path}", model)
    assert sorted(items) == ["0", "1", "2", "3"]  # the first five are shown, not asked
    shown = "".join(
        f"Question: {problem['question']}\nAnswer: {problem['answer']}\n\n"
        for problem in PROBLEMS[:5]
    )
    ids, params = items["2"].requests[0]
    asked = str(model.tokenizer.decode(ids))
    assert asked == f"{shown}Question: What is 7 + 1?\nAnswer:"
    assert params.is_greedy
    assert params.stop_strings == ("Question:", "</s>", "<|im_end|>")
    assert params.max_tokens == 256


def test_gsm8k_takes_examples_from_a_second_file(tmp_path: Path, model: LoadedModel) -> None:
    path = json_lines(tmp_path / "problems.jsonl", PROBLEMS[:2])
    examples = json_lines(tmp_path / "train@64.jsonl", PROBLEMS[2:])
    items = items_of(f"gsm8k={path}@{examples}", model)
    assert sorted(items) == ["0", "1"]
    asked = str(model.tokenizer.decode(items["0"].requests[0][0]))
    assert asked.startswith("Question: What is 2 + 1?")
    assert asked.endswith("Question: What is 0 + 1?\nAnswer:")


@pytest.mark.parametrize(
    ("answer", "strict", "flexible"),
    [
        ("5+6 = 11\n#### 1,011", 1, 1),
        ("#### 1011.", 1, 1),
        ("It is $1,011.", 0, 1),
        ("#### 1011 or rather 12", 1, 0),
        ("1011 #### 12", 0, 0),
        ("#### about 1011", 0, 1),
        ("####1011", 0, 1),
        ("none", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k_scores(answer: str, strict: int, flexible: int) -> None:
    scores = score_answer(answer, "text with 7\n#### 1,011")
    assert scores == {"exact_match,strict": strict, "exact_match,flexible": flexible}


def test_gsm8k_agrees_with_lm_eval() -> None:
    extraction = pytest.importorskip("lm_eval.filters.extraction")
    metrics = pytest.importorskip("lm_eval.api.metrics")
    filters = {
        "strict": extraction.RegexFilter("#### (\\-?[0-9\\.\\,]+)"),
        "flexible": extraction.RegexFilter("(-?[$0-9.,]{2,})|(-?[0-9]+)", group_select=-1),
    }
    ignored = [",", "\\$", "(?s).*#### ", "\\.$"]
    reference = "He has 12 - 1 = 11 left\n#### -1,250"
    for answer in (
        *("#### -1250", "#### -1,250.", "#### 1250", "-1250.", "it is -$1,250", "#### ", "..", "5"),
        *("#### -1250\n#### 3", "x #### -1250. So -1250", "1 2 3 -1,250\n", "$", "-", "", "#### ."),
    ):
        for name, found in filters.items():
            (prediction,) = next(iter(found.apply([[answer]], [{}])))
            expected = metrics.exact_match_fn(
                predictions=[prediction],
                references=[reference],
                regexes_to_ignore=ignored,
                ignore_case=True,
            )
            assert score_answer(answer, reference)[f"exact_match,{name}"] == expected["exact_match"]


def test_gsm8k_finds_the_published_answers() -> None:
    folder = os.environ.get("TIGHTKV_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data"
    path = Path(folder) / "gsm8k_test.jsonl"
    if not path.exists():
        pytest.skip("gsm8k_test.jsonl is not there: name its folder in TIGHTKV_TEST_DATA")
    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    right = [score_answer(answer, answer) for answer in answers]
    assert sum(score["exact_match,strict"] for score in right) == 1319
    assert sum(score["exact_match,flexible"] for score in right) == 1319
    shifted = itertools.pairwise(answers)
    assert sum(score_answer(*pair)["exact_match,strict"] for pair in shifted) < 60


def test_choice_is_seeded() -> None:
    entries = [f"entry {index}" for index in range(50)]
    chosen = choose(entries, 10, seed=3)
    assert chosen == choose(entries, 50, seed=3)[:10]
    assert chosen != choose(entries, 10, seed=4)
    assert all(entry == f"entry {name}" for name, entry in chosen)
    assert sorted(choose(entries, None, 0)) == sorted(choose(entries, 0, 1))


def expected_logprobs(context: str, ends: Sequence[str]) -> list[float]:
    """Sums over each end's tokens after the context, by transformers in float32."""
    network, tokenizer = tiny_model("llama", max_position_embeddings=1024), tiny_tokenizer()
    before = len(tokenizer(context).input_ids)
    sums = []
    for end in ends:
        whole = tokenizer(context + end).input_ids
        with torch.no_grad():
            logprobs = network(torch.tensor([whole])).logits[0].log_softmax(-1)
        sums.append(sum(logprobs[i - 1, whole[i]].item() for i in range(before, len(whole))))
    return sums


def test_multiple_choice_is_right_where_transformers_says_so(
    tmp_path: Path, model: LoadedModel
) -> None:
    path = json_lines(tmp_path / "questions.jsonl", QUESTIONS)
    arms = make_arms(model, "auto")
    scores = parse_task(f"multiple_choice={path}", CONFIG).measure(
        arms, Journal(None, ""), no_progress
    )["auto"]
    sky = "The sky is\nA. blue\nB. green\nC. a cat\nAnswer:"
    by_letter = expected_logprobs(sky, [" A", " B", " C"])
    assert scores["0"] == {"acc": float(max(by_letter) == by_letter[0])}
    ends = [" dry", " wet", " loud"]
    by_text = expected_logprobs("Question: Water is\nAnswer:", ends)
    per_byte = [value / (len(end) - 1) for value, end in zip(by_text, ends, strict=True)]
    assert scores["2"] == {"acc_norm": float(max(per_byte) == per_byte[1])}
    # Later choices find the question of the first in the prefix cache.
    assert arms.base.engine.stats.prefix_cache_hits > 0


def test_multiple_choice_in_the_layout_of_mmlu(tmp_path: Path, model: LoadedModel) -> None:
    path = tmp_path / "anatomy_test.csv"
    path.write_text('"Which, of\nthese?",one,two,three,four,C\nWhat?,1,2,3,4,A\n')
    examples = tmp_path / "anatomy_dev.csv"
    examples.write_text("Who?,he,she,B\n" * 7)
    task = parse_task(f"multiple_choice={path}@{examples}", CONFIG)
    assert task.name == "multiple_choice:anatomy_test"
    items = items_of(f"multiple_choice={path}@{examples}", model)
    prompt, params = items["0"].requests[2]
    shown = "Who?\nA. he\nB. she\nAnswer: B\n\n"
    asked = "Which, of\nthese?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    assert model.tokenizer.decode(prompt) == shown * 5 + asked
    assert model.tokenizer.decode(params.forced_token_ids) == " C"


def test_human_eval(tmp_path: Path, model: LoadedModel) -> None:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(json_lines(tmp_path / "p", PROGRAMS).read_bytes()))
    allowed = EvaluationConfig(allow_code_execution=True)
    task = parse_task(f"humaneval={path}", allowed)
    items = items_of(f"humaneval={path}", model, allowed)

    class Said:
        def __init__(self, text: str) -> None:
            self.text = text

    assert items["0"].score([Said("    return 1")]) == {"pass@1": 1}
    assert items["0"].score([Said("    return (")]) == {"pass@1": 0}
    assert items["2"].score([Said("nothing")]) == {"pass@1": 1}
    assert items["2"].score([Said("\nimport sys; sys.exit(0)")]) == {"pass@1": 0}
    assert "\ndef" in items["0"].requests[0][1].stop_strings
    assert (
        task.sha256
        != parse_task(
            f"humaneval={path}", EvaluationConfig(allow_code_execution=True, task_limit=2)
        ).sha256
    )


@pytest.mark.parametrize(
    ("text", "content", "said"),
    [
        ("gsm9k=FILE", "", "did you mean gsm8k=FILE?"),
        ("gsm8k=", "", "names no file"),
        ("gsm8k=FILE", None, "cannot be read"),
        ("gsm8k=FILE", "", "FILE is empty"),
        ("gsm8k=FILE", "{}\n[]\n", "FILE, line 2 is not a JSON object"),
        ("gsm8k=FILE", "{}\n\n{\n", "FILE, line 3 is not JSON"),
        ("gsm8k=FILE", "{}\n" * 6, 'FILE, line 1 has no text under "question"'),
        ("gsm8k=FILE", '{"question": "?", "answer": "1"}\n' * 6, "line 1 has an answer without"),
        ("gsm8k=FILE", '{"question": "?", "answer": "#### 1"}\n' * 5, "FILE has 5 problems"),
        ("gsm8k=FILE@FILE2", "{}\n", "FILE2 cannot be read"),
        ("multiple_choice", "", "needs a file"),
        ("multiple_choice=FILE", '{"question": "?", "answer": 0}', "line 1 has 0 choices"),
        ("multiple_choice=FILE", '{"question": "?", "choices": ["a", "b"], "answer": 2}', "0 to 1"),
        ("multiple_choice=FILE", '{"question": "?", "choices": ["a", "b"], "answer": "C"}', "to B"),
        (
            "multiple_choice=FILE",
            '{"question": "?", "choices": ["a", "b"], "answer": 0, "score": "x"}',
            'give "letter" or "text"',
        ),
        (
            "multiple_choice=FILE",
            json.dumps({"question": "?", "choices": ["a"] * 27, "answer": 0}),
            'set "score" to "text"',
        ),
        ("multiple_choice=FILE.csv", "q,a,b,A\nq,a,b,answer\n", "line 2 has the answer 'answer'"),
        ("multiple_choice=FILE.csv", 'q,a,b,A\n"q\n', "is not CSV"),
        ("multiple_choice=FILE.csv", " ,a,b,A\n", "line 1 has 2 choices, or an empty one"),
        ("multiple_choice=FILE.csv", "A\n", "line 1 has 0 choices"),
        ("humaneval=FILE", "{}", "--allow-code-execution"),
    ],
)
def test_what_is_no_task_is_refused(
    tmp_path: Path, text: str, content: str | None, said: str
) -> None:
    file = tmp_path / ("FILE.csv" if "csv" in text else "FILE")
    if content is not None:
        file.write_text(content)
    with pytest.raises(RequestError) as caught:
        parse_task(text.replace("FILE", str(tmp_path / "FILE")), CONFIG)
    assert said in str(caught.value).replace(f"{tmp_path}/", "")


def test_the_same_task_twice_is_refused(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "problems.jsonl", PROBLEMS)
    with pytest.raises(RequestError, match="gsm8k is given twice"):
        parse_tasks(EvaluationConfig(tasks=(f"gsm8k={path}", f"gsm8k={path}")))


def test_the_hub_comes_where_no_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name: str, subset: str, split: str) -> list[dict[str, str]]:
        asked.append((name, subset, split))
        return PROBLEMS[: 9 if split == "train" else 3]

    monkeypatch.setattr(datasets, "load_dataset", load)
    parse_task("gsm8k", CONFIG)
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")]

    def fail(*_arguments: str, **_options: str) -> None:
        raise ConnectionError("no network. More of it")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(RequestError, match=r"cannot be fetched from the hub \(no network\)"):
        parse_task("gsm8k", CONFIG)


def test_a_prompt_that_is_too_long_is_refused_before_anything_runs(
    tmp_path: Path, model: LoadedModel
) -> None:
    path = json_lines(tmp_path / "problems.jsonl", PROBLEMS)
    arms = make_arms(model, "int8", max_model_len=400)
    with pytest.raises(PromptTooLongError, match=r"gsm8k: item \d needs \d+ tokens .* 400 is"):
        run_task(parse_task(f"gsm8k={path}", CONFIG), arms, Journal(None, ""), no_progress)
    assert arms.base.engine.stats.num_steps == 0


def test_figures_and_progress(tmp_path: Path, model: LoadedModel) -> None:
    path = json_lines(tmp_path / "questions.jsonl", QUESTIONS)
    arms = make_arms(model, "auto", "fp8_e5m2")
    told: list[tuple[str, int, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        told.append((stage, done, total))

    task = parse_task(f"multiple_choice={path}", CONFIG)
    figures = run_task(task, arms, Journal(None, ""), progress)
    assert list(figures) == ["auto", "fp8_e5m2"]
    acc, acc_norm = figures["auto"]
    assert (acc.metric, acc.num_items) == ("acc", 2)
    assert (acc_norm.metric, acc_norm.num_items) == ("acc_norm", 2)
    assert acc.drop == acc.only_base == acc.only_arm == 0
    assert acc.task == "multiple_choice:questions"
    assert told == [
        ("task/multiple_choice:questions", done, 12)
        for done in (*range(5), *range(4, 9), *range(8, 13))
    ]


def test_a_run_goes_on_where_it_was(
    tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gsm8k, "_MAX_TOKENS", 24)
    path = json_lines(tmp_path / "problems.jsonl", PROBLEMS)
    task = parse_task(f"gsm8k={path}", CONFIG)
    whole = run_task(task, make_arms(model, "int8"), Journal(None, ""), no_progress)

    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    journal = tmp_path / "progress.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_task(task, make_arms(model, "int8"), Journal(journal, "run"), interrupt)
    asked = []
    generate = Arm.generate

    def counted(self: Arm, prompts: Sequence[Sequence[int]], *arguments: Any) -> None:
        asked.extend([self.name] * len(prompts))
        generate(self, prompts, *arguments)

    monkeypatch.setattr(Arm, "generate", counted)
    resumed = Journal(journal, "run")
    assert resumed.num_results == 6
    assert resumed.has("task/gsm8k/base/0")
    assert run_task(task, make_arms(model, "int8"), resumed, no_progress) == whole
    assert asked == ["int8", "int8"]
