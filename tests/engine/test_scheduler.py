"""Which sequences take part in a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightkv import LLM
from tiny_engine import GREEDY, prompts, tiny_llm
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def running_after_each_step(llm: LLM, together: list[list[int]], num_steps: int) -> list[int]:
    """Numbers of sequences that run, for prompts that come together."""
    for index, prompt in enumerate(together):
        llm.engine.add_request(f"request {index}", prompt, GREEDY)
    counts = []
    for _ in range(num_steps):
        llm.engine.step()
        counts.append(len(llm.engine.scheduler.running))
    return counts


def test_a_step_with_work_enough_begins_no_other_prompt(folder: Path) -> None:
    """The first prompt would wait for the second, which is not done sooner by that."""
    llm = tiny_llm(folder, max_num_batched_tokens=512)
    assert running_after_each_step(llm, prompts(3, 100), 4) == [1, 2, 3, 3]


def test_short_prompts_share_a_step(folder: Path) -> None:
    llm = tiny_llm(folder, max_num_batched_tokens=512)
    assert running_after_each_step(llm, prompts(4, 8), 1) == [4]
