"""The works in vLLM, offline."""

from __future__ import annotations

import argparse

import vllm  # type: ignore[import-not-found]

from benchmarks.serving import driver


def load(options: argparse.Namespace) -> vllm.LLM:
    return vllm.LLM(
        model=options.model,
        dtype="float32",
        kv_cache_dtype=options.kv_cache,
        kv_cache_memory_bytes=options.kv_cache_bytes,
        max_model_len=options.max_model_len,
        enable_prefix_caching=False,
        block_size=options.block_size,
        enforce_eager=bool(options.enforce_eager),
    )


def answers(llm: vllm.LLM, prompts: driver.Prompts, new_tokens: int) -> driver.Prompts:
    params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate(options: argparse.Namespace) -> driver.Result:
    llm = load(options)
    return driver.timed_answers(lambda prompts, count: answers(llm, prompts, count), options)


def startup(options: argparse.Namespace) -> driver.Result:
    answers(load(options), options.prompts, 1)
    driver.say_first_token()
    return {}


# The engine runs in a process of its own, which imports this file again.
if __name__ == "__main__":
    driver.run(vllm.__version__, {"generate": generate, "startup": startup})
