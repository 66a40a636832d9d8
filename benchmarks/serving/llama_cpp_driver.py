"""The works in llama.cpp, by the low-level interface of llama-cpp-python."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found]
import numpy

from benchmarks.serving import driver

CACHE_TYPES = {
    "auto": llama_cpp.GGML_TYPE_F16,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
}
# llama.cpp takes context lengths in such pieces.
CONTEXT_STEP = 256
LOG_LEVEL_ERROR = 4


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def log_errors(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    if level == LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class Session:
    """A model and its context, which decodes batches of (token, position, sequence)."""

    def __init__(self, options: argparse.Namespace, length: int, num_sequences: int = 1) -> None:
        self.batch_size = options.batch_size
        self._model = llama_cpp.llama_model_load_from_file(
            os.fsencode(options.model), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_sequences * -(-length // CONTEXT_STEP) * CONTEXT_STEP
        params.n_batch = params.n_ubatch = options.batch_size
        params.n_seq_max = num_sequences
        params.n_threads = params.n_threads_batch = options.threads
        params.type_k = params.type_v = CACHE_TYPES[options.kv_cache]
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = bool(options.kv_unified)
        self._context = self._model and llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(options.batch_size, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )

    def decode(self, rows: Iterable[tuple[int, int, int]], wanted: Iterable[int]) -> list[int]:
        """Compute one batch; the most probable next token of the rows `wanted`."""
        batch, indices = self._batch, list(wanted)
        batch.n_tokens = 0
        for index, (token, position, sequence) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = False
            batch.n_tokens += 1
        for index in indices:
            batch.logits[index] = True
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with status {status}")
        return [self._best(index) for index in indices]

    def prefill(self, tokens: list[int], sequence: int = 0) -> int:
        """Fill an empty sequence; the most probable next token."""
        best = [-1]
        for begin in range(0, len(tokens), self.batch_size):
            piece = tokens[begin : begin + self.batch_size]
            is_last = begin + len(piece) == len(tokens)
            rows = ((token, begin + index, sequence) for index, token in enumerate(piece))
            best = self.decode(rows, [len(piece) - 1] if is_last else [])
        llama_cpp.llama_synchronize(self._context)
        return best[0]

    def truncate(self, length: int, sequence: int = -1) -> None:
        """Take all tokens from position `length` on out of a sequence; -1 is all of them."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, length, -1)

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return int(numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def prepare(options: argparse.Namespace) -> driver.Result:
    """Write the model with float32 weights: the numbers that its quantized ones stand for."""
    unfinished = options.output.with_name(f".{options.output.name}.{os.getpid()}")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    try:
        status = llama_cpp.llama_model_quantize(
            os.fsencode(options.model), os.fsencode(unfinished), ctypes.byref(params)
        )
        if status:
            raise RuntimeError(f"llama_model_quantize failed with status {status}")
        unfinished.rename(options.output)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return {}


def slope(options: argparse.Namespace) -> driver.Result:
    """Decode steps of one sequence per length, each in a buffer of its own."""
    text, lengths = options.prompts[0], list(options.lengths)
    options.kv_unified = 0
    session = Session(options, max(lengths) + options.steps + 1, len(lengths))
    first_tokens = []
    for sequence, length in enumerate(lengths):
        driver.progress(f"{length} cached tokens")
        first_tokens.append(session.prefill(text[:length], sequence))

    def begin(length: int) -> Callable[[], object]:
        sequence = lengths.index(length)
        session.truncate(length, sequence)
        token, position = first_tokens[sequence], length

        def step() -> None:
            nonlocal token, position
            (token,) = session.decode([(token, position, sequence)], [0])
            position += 1

        return step

    seconds = driver.seconds_by_length(lengths, options.steps, begin)
    return {"lengths": lengths, "seconds": seconds}


def prefill(options: argparse.Namespace) -> driver.Result:
    prompt = options.prompts[0]
    session = Session(options, len(prompt))
    session.prefill(prompt[-64:])
    session.truncate(0)
    start = time.perf_counter()
    session.prefill(prompt)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens_per_second": len(prompt) / seconds}


def generate(options: argparse.Namespace) -> driver.Result:
    """All prompts in one batch, then one token of each sequence per batch."""
    options.batch_size = max(options.batch_size, sum(map(len, options.prompts)))
    longest = max(map(len, options.prompts)) + options.new_tokens
    session = Session(options, longest, len(options.prompts))

    def answers(prompts: driver.Prompts, new_tokens: int) -> driver.Prompts:
        session.truncate(0)
        rows, ends = [], []
        for sequence, prompt in enumerate(prompts):
            rows += [(token, position, sequence) for position, token in enumerate(prompt)]
            ends.append(len(rows) - 1)
        steps = [session.decode(rows, ends)]
        for count in range(new_tokens - 1):
            rows = [
                (token, len(prompt) + count, sequence)
                for sequence, (token, prompt) in enumerate(zip(steps[-1], prompts, strict=True))
            ]
            steps.append(session.decode(rows, range(len(prompts))))
        return [list(answer) for answer in zip(*steps, strict=True)]

    return driver.timed_answers(answers, options)


if __name__ == "__main__":
    llama_cpp.llama_log_set(log_errors, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    driver.run(
        llama_cpp.__version__,
        {"prepare": prepare, "slope": slope, "prefill": prefill, "generate": generate},
    )
