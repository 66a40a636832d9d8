"""Run the largest steps that an engine may run, in a process of their own, and print two numbers:
the bytes by which the process has grown, at its peak, and the bytes that the engine kept for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tightkv import LLM, SamplingParams
from tightkv.engine.scheduler import MAX_PROMPT_LOGPROBS_ROWS

_NUM_SEQS, _NUM_TOKENS = 64, 1024
_ANSWER = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
_ROWS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)


def main() -> None:
    llm = LLM(
        sys.argv[1],
        kv_cache_memory_bytes=128 << 20,
        max_model_len=_NUM_TOKENS,
        max_num_seqs=_NUM_SEQS,
        max_num_batched_tokens=_NUM_TOKENS,
        enable_prefix_caching=False,
    )
    _touch_the_pool(llm)
    _run(llm, 0, 8, _ANSWER)  # code and threads are there now
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _bytes("VmRSS")
    others = _NUM_SEQS - 1
    _run(llm, others, _NUM_TOKENS - others, _ANSWER)
    _run(llm, others, MAX_PROMPT_LOGPROBS_ROWS + 1, _ROWS)
    grown = _bytes("VmHWM") - before
    sys.stdout.write(f"{grown} {llm.engine.pool_request.peak_bytes}\n")


def _touch_the_pool(llm: LLM) -> None:
    storage = llm.engine.storage
    for group in storage.groups:
        for spec in group.specs:
            storage.layer(spec.layer_idx).blocks.fill_(0)


def _run(llm: LLM, num_others: int, prompt_len: int, params: SamplingParams) -> None:
    """A step of one prompt beside others that decode."""
    engine = llm.engine
    for index in range(num_others):
        engine.add_request(str(index), [index + 1], _ANSWER)
    while engine.scheduler.waiting:
        engine.step()
    engine.add_request("prompt", list(range(1, prompt_len + 1)), params)
    engine.step()
    if engine.scheduler.waiting:
        raise RuntimeError("the pool has no room for the prompt")
    for request in engine.requests:
        engine.abort_request(request.request_id)


def _bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
