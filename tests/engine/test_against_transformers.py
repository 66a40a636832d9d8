"""Greedy tokens of the engine with a full-precision cache are those of transformers.generate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_engine import generate_with_transformers, prompts, tiny_llm, token_ids
from tiny_models import SPECIFIC, save_tiny_model


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
