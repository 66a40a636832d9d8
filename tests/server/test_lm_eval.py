"""lm-evaluation-harness over HTTP gives the scores of transformers' own logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from live_server import live_server
from tiny_models import save_tiny_model, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " green", " a cat"], "answer": 0},
    {"question": "Two and two make", "choices": [" five", " four"], "answer": 1},
    {"question": "Water is", "choices": [" dry", " wet", " loud", " square"], "answer": 1},
]

TASK = """
task: local_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: multiple_choice
target_delimiter: ""
doc_to_text: question
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - metric: acc
"""


def expected_scores() -> list[list[float]]:
    """Log-likelihood of each choice after its question, by transformers in float32."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    scores = []
    for question in QUESTIONS:
        row = []
        for choice in question["choices"]:  # type: ignore[attr-defined]
            context = tokenizer(question["question"]).input_ids
            whole = tokenizer(f"{question['question']}{choice}").input_ids
            with torch.no_grad():
                logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            positions = range(len(context), len(whole))
            row.append(sum(logprobs[i - 1, whole[i]].item() for i in positions))
        scores.append(row)
    return scores


def test_loglikelihoods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    lm_eval = pytest.importorskip("lm_eval")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local_choices.yaml").write_text(TASK.format(path=data))
    folder = save_tiny_model(tmp_path / "llama")
    with live_server(folder) as server:
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "tiny",
                "base_url": f"{server.url}/v1/completions",
                "tokenizer": str(folder),
                "tokenized_requests": True,
                "num_concurrent": 4,
            },
            tasks=["local_choices"],
            task_manager=lm_eval.tasks.TaskManager(
                include_path=str(tmp_path / "tasks"), include_defaults=False
            ),
            log_samples=True,
            bootstrap_iters=0,
        )
        server.wait_until_idle()
    samples = sorted(results["samples"]["local_choices"], key=lambda sample: sample["doc_id"])
    for sample, expected in zip(samples, expected_scores(), strict=True):
        scores = [score for score, _ in sample["filtered_resps"]]
        assert scores == pytest.approx(expected, abs=1e-3)
