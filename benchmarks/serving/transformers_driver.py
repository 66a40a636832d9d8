"""The works in transformers, by its continuous batching."""

from __future__ import annotations

import argparse

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.serving import driver


def generate(options: argparse.Namespace) -> driver.Result:
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)

    def answers(prompts: driver.Prompts, new_tokens: int) -> driver.Prompts:
        # A token that does not exist ends no answer.
        config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
        outputs = model.generate_batch(prompts, generation_config=config)
        return [list(output.generated_tokens) for output in outputs.values()]

    return driver.timed_answers(answers, options)


if __name__ == "__main__":
    driver.run(transformers.__version__, {"generate": generate})
