"""Greedy tokens of the engine with a full-precision cache are those of transformers.generate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny_engine import GREEDY, prompts, tiny_llm, token_ids
from tiny_models import SPECIFIC, save_tiny_model, tiny_model


def generate_with_transformers(model_type: str, prompt: list[int]) -> list[int]:
    model = tiny_model(model_type)
    ids = torch.tensor([prompt])
    generated = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=GREEDY.max_tokens,
        min_new_tokens=GREEDY.max_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return list(map(int, generated[0, len(prompt) :]))


@pytest.mark.parametrize("model_type", sorted(SPECIFIC))
@pytest.mark.filterwarnings("ignore")  # of transformers.generate
def test_greedy_tokens(model_type: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / model_type, model_type)
    expected = [generate_with_transformers(model_type, prompt) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    whole = tiny_llm(folder, max_num_batched_tokens=512)
    assert token_ids(whole, prompts()) == expected, "batched"
    assert [token_ids(whole, [prompt])[0] for prompt in prompts()] == expected, "one by one"
    cut = tiny_llm(folder, max_num_batched_tokens=7)
    assert token_ids(cut, prompts()) == expected, "prompts cut into chunks of at most 7"
