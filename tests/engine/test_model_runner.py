"""Layers in one call, of which the last makes only rows of logits, against layers in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tightkv import LLM, SamplingParams
from tightkv.engine.sequence import Sequence
from tightkv.kernels import CpuBackend
from tightkv.kernels.ops import ReferenceBackend
from tightkv.models import runs_in_one_call
from tightkv.models.linear import cpu_backend
from tiny_engine import prompts, tiny_llm
from tiny_models import save_tiny_model

FUSED = ("llama", "mistral", "qwen2", "qwen3")
NOTED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
PLAIN = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def seen_logits(llm: LLM) -> dict[tuple[str, int], torch.Tensor]:
    """By sequence and position, for prompts with and without log-probabilities."""
    seen: dict[tuple[str, int], torch.Tensor] = {}

    def observe(sequence: Sequence, position: int, logits: torch.Tensor) -> None:
        seen[sequence.seq_id, position] = logits.clone()

    llm.engine.observe_logits(observe)
    given = prompts()
    llm.generate(given, [NOTED if index % 2 else PLAIN for index in range(len(given))])
    return seen


@pytest.mark.parametrize("name", FUSED)
def test_one_call_gives_the_bits_of_the_pieces(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / name, name)
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "enable_prefix_caching": False}
    expected: dict[tuple[str, int], torch.Tensor] = {}
    for in_one_call in (True, False):
        for budget in (64, 13):  # whole prompts, and chunks that need no logits
            llm = tiny_llm(folder, max_num_batched_tokens=budget, **options)
            runner = llm.engine._runner
            assert runner._has_steps
            runner._has_steps = in_one_call
            seen = seen_logits(llm)
            expected = expected or seen
            assert seen.keys() == expected.keys()
            assert all(torch.equal(seen[key], expected[key]) for key in seen)
            assert llm.engine.storage._num_written == sum(map(len, prompts())) + 4 * 7


def test_pieces_where_one_call_is_not_possible(tmp_path: Path) -> None:
    """Other kernels than the products' own, or layers of another kind."""
    folder = save_tiny_model(tmp_path / "llama", "llama")
    model = tiny_llm(folder).engine.model.model
    assert runs_in_one_call(model, cpu_backend())
    assert not runs_in_one_call(model, CpuBackend("scalar"))
    assert not runs_in_one_call(model, ReferenceBackend())
    other = save_tiny_model(tmp_path / "gemma3_text", "gemma3_text")
    assert not tiny_llm(other).engine._runner._has_steps
