"""SmolLM2-135M-Instruct: a real model, real text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM

from real_model import smollm2, smollm2_folder
from tightkv import LLM, SamplingParams
from tightkv.metrics import Divergence
from tightkv.models.compatibility import quiet_transformers
from tiny_engine import logits_by_position

NUM_PROMPTS, NUM_TOKENS = 20, 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(autouse=True)
def two_threads(one_thread: None) -> None:
    """A real model has work for more than the one thread of other tests."""
    torch.set_num_threads(2)


def texts() -> list[str]:
    """Beginnings of different texts, from 20 to 115 words."""
    words = [text.split() for text in topics.values()]
    long_enough = [text for text in words if len(text) >= 120]
    return [" ".join(text[: 20 + 5 * i]) for i, text in enumerate(long_enough[:NUM_PROMPTS])]


def generate_with_transformers(prompts: list[list[int]]) -> list[list[int]]:
    with quiet_transformers():
        plain = AutoModelForCausalLM.from_pretrained(
            smollm2_folder(), dtype=torch.float32, attn_implementation="sdpa"
        )
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            generated = plain.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
            answers.append(list(map(int, generated[0, len(prompt) :])))
    return answers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers.generate
def test_greedy_tokens_are_those_of_transformers() -> None:
    llm = LLM(smollm2(), kv_cache_memory_bytes=512 << 20, max_num_seqs=NUM_PROMPTS)
    prompts = [llm.engine.tokenize(text) for text in texts()]
    assert len(prompts) == NUM_PROMPTS
    expected = generate_with_transformers(prompts)
    whole = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY)]
    assert whole == expected
    cut = LLM(smollm2(), kv_cache_memory_bytes=512 << 20, max_num_seqs=4, max_num_batched_tokens=7)
    assert [list(o.outputs[0].token_ids) for o in cut.generate(prompts, GREEDY)] == expected


@pytest.mark.slow
def test_dynamic_int8_costs_what_the_simulation_says() -> None:
    """Mean KL at most 0.0015 and the same top token in 98 % (here on the first 1,024 tokens)."""
    text = smollm2().tokenizer("\n\n".join(topics.values())).input_ids[:1024]
    arms = []
    for dtype in ("float32", "int8_per_token_head"):
        llm = LLM(smollm2(), kv_cache_dtype=dtype, max_model_len=1025, max_num_seqs=1)
        params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0)
        rows = logits_by_position(llm, text, params)
        arms.append(torch.stack([rows[position] for position in range(len(text) - 1)]))
    (divergence,) = Divergence.of_arms(arms[0], arms[1:], torch.tensor(text[1:]))
    figures = divergence.figures()
    assert 0.0003 < figures.kld.mean <= 0.0015
    assert figures.same_top_p >= 0.98


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_the_largest_steps_is_what_was_planned_for() -> None:
    script = Path(__file__).with_name("largest_step.py")
    done = subprocess.run(
        [sys.executable, str(script), str(smollm2_folder())],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    grown, planned = map(int, done.stdout.split())
    assert planned == pytest.approx(grown, rel=0.15)
