"""The works in TightKV."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from pydoc_data.topics import topics
from unittest.mock import patch

from transformers import AutoTokenizer

import tightkv
from benchmarks.serving import driver
from tightkv import LLM, LLMEngine, SamplingParams
from tightkv.benchmark.process_memory import peak_bytes
from tightkv.engine.model_runner import ModelRunner
from tightkv.engine.request import Request
from tightkv.engine.sampler import Sampler
from tightkv.models.gguf import convert_gguf


def load(options: argparse.Namespace, *, enable_prefix_caching: bool = False) -> LLM:
    return LLM(
        options.model,
        kv_cache_dtype=options.kv_cache,
        kv_cache_memory_bytes=options.kv_cache_bytes,
        max_model_len=options.max_model_len,
        enable_prefix_caching=enable_prefix_caching,
    )


def greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)


def prefill_of(engine: LLMEngine, prompt: list[int], new_tokens: int) -> Request:
    """Step until a request has its first token, with which its decode steps begin."""
    request = engine.add_request(f"tokens-{len(prompt)}", prompt, greedy(new_tokens))
    while not request.sequences[0].num_output_tokens:
        engine.step()
    return request


def prepare(options: argparse.Namespace) -> driver.Result:
    """Convert the model; the folder's own tokenizer makes the token ids that all engines get."""
    folder = convert_gguf(Path(options.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n\n".join(topics.values())
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return {"folder": str(folder), "token_ids": ids}


def slope(options: argparse.Namespace) -> driver.Result:
    """Decode steps at several lengths of one text, which the prefix cache keeps."""
    llm = load(options, enable_prefix_caching=True)
    text = options.prompts[0]
    llm.generate([text[: max(options.lengths)]], greedy(4))

    def begin(length: int) -> Callable[[], object]:
        prefill_of(llm.engine, text[:length], options.steps + 2)
        return llm.engine.step

    seconds = driver.seconds_by_length(options.lengths, options.steps, begin)
    return {"lengths": options.lengths, "seconds": seconds}


def prefill(options: argparse.Namespace) -> driver.Result:
    llm = load(options)
    prompt = options.prompts[0]
    llm.generate([prompt[-64:]], greedy(4))
    start = time.perf_counter()
    prefill_of(llm.engine, prompt, 1)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens_per_second": len(prompt) / seconds}


def generate(options: argparse.Namespace) -> driver.Result:
    llm = load(options)

    def answers(prompts: driver.Prompts, new_tokens: int) -> driver.Prompts:
        outputs = llm.generate(prompts, greedy(new_tokens))
        return [list(output.outputs[0].token_ids) for output in outputs]

    result = driver.timed_answers(answers, options)
    return {**result, "preemptions": llm.engine.stats.num_preemptions}


class Stopwatch:
    """Adds up the seconds inside some methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on(self, owner: type, name: str) -> AbstractContextManager[object]:
        """While the context lasts, calls of a method are timed."""
        method: Callable[..., object] = getattr(owner, name)

        def timed(*arguments: object, **keywords: object) -> object:
            start = time.perf_counter()
            try:
                return method(*arguments, **keywords)
            finally:
                self.seconds += time.perf_counter() - start

        return patch.object(owner, name, timed)


def overhead(options: argparse.Namespace) -> driver.Result:
    """How long decode steps are, and how much of them is neither forward pass nor sampler."""
    llm = load(options)
    llm.generate(options.prompts, greedy(2))
    engine = llm.engine
    requests = [
        engine.add_request(str(index), prompt, greedy(options.new_tokens))
        for index, prompt in enumerate(options.prompts)
    ]
    while not all(request.sequences[0].num_output_tokens for request in requests):
        engine.step()
    watch = Stopwatch()
    start, steps = time.perf_counter(), 0
    with watch.on(ModelRunner, "execute"), watch.on(Sampler, "sample"):
        while engine.has_unfinished_requests:
            engine.step()
            steps += 1
    seconds = time.perf_counter() - start
    return {
        "steps": steps,
        "step_seconds": seconds / steps,
        "outside_seconds": (seconds - watch.seconds) / steps,
    }


def startup(options: argparse.Namespace) -> driver.Result:
    load(options).generate(options.prompts, greedy(1))
    driver.say_first_token()
    return {}


def memory(options: argparse.Namespace) -> driver.Result:
    """Peak memory of a process that serves one long sequence."""
    llm = load(options)
    loaded = peak_bytes()
    llm.generate(options.prompts, greedy(options.new_tokens))
    return {"loaded_peak_bytes": loaded, "peak_bytes": peak_bytes()}


if __name__ == "__main__":
    driver.run(
        tightkv.__version__,
        {
            "prepare": prepare,
            "slope": slope,
            "prefill": prefill,
            "generate": generate,
            "overhead": overhead,
            "startup": startup,
            "memory": memory,
        },
    )
