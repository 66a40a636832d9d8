"""Many streaming clients at once, some of which leave: does each get what an idle server gives?

    python tests/server/load.py MODEL [--clients 64] [--requests 2000] [--kv-cache-dtype int8]

Starts the server in this process with a pool for 8 requests, asks each prompt once while it is
idle, then all clients at once. Ends with one JSON line; exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx

from live_server import LiveServer, live_server
from tightkv import LLM

_TIMEOUT = 600.0
_PROBABILITY_TO_LEAVE = 0.2


@dataclass(frozen=True)
class Task:
    """A prompt and how many tokens are asked for."""

    prompt: tuple[int, ...]
    max_tokens: int

    def body(self) -> dict[str, object]:
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }


@dataclass
class LoadReport:
    """What came of a run.

    Attributes:
        gaps: seconds between one event of a stream and the next.
    """

    num_answered: int = 0
    num_left: int = 0
    wrong: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def percentile(self, percent: int) -> float:
        return statistics.quantiles(self.gaps, n=100)[percent - 1]


def make_tasks(vocab_size: int, count: int, longest: int, max_tokens: int) -> list[Task]:
    """Prompts of random tokens; every third begins like another."""
    rng = random.Random(0)
    tasks: list[Task] = []
    for index in range(count):
        length = rng.randint(1, longest)
        prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
        if index % 3 == 2:
            prompt = (tasks[index - 1].prompt + prompt)[:longest]
        tasks.append(Task(prompt, rng.randint(1, max_tokens)))
    return tasks


async def answer(
    client: httpx.AsyncClient,
    task: Task,
    gaps: list[float] | None = None,
    leave_after: int | None = None,
) -> str | None:
    """Text of an answer; None if the client left before its end.

    Args:
        client: on the server's address.
        task: what is asked.
        gaps: gets the seconds between one event and the next.
        leave_after: events after which the client goes away.
    """
    text, num_events, last = "", 0, 0.0
    async with client.stream("POST", "/v1/completions", json=task.body()) as response:
        if response.status_code != 200:
            raise AssertionError(f"status {response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return text
            event = json.loads(line.removeprefix("data: "))
            text += event["choices"][0]["text"]
            now = time.monotonic()
            if gaps is not None and num_events:
                gaps.append(now - last)
            num_events, last = num_events + 1, now
            if leave_after is not None and num_events >= leave_after:
                return None
    raise AssertionError("the stream ended without [DONE]")


async def run_load(url: str, tasks: list[Task], num_clients: int, num_requests: int) -> LoadReport:
    """Ask the idle server, then with all clients at once."""
    report = LoadReport()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=_TIMEOUT, limits=limits, trust_env=False
    ) as client:
        expected = {task: await answer(client, task) for task in tasks}
        rng = random.Random(1)
        todo = [
            (rng.choice(tasks), rng.randint(1, 8) if rng.random() < _PROBABILITY_TO_LEAVE else None)
            for _ in range(num_requests)
        ]
        begin = time.monotonic()

        async def work() -> None:
            while todo:
                task, leave_after = todo.pop()
                text = await answer(client, task, report.gaps, leave_after)
                if text is None:
                    report.num_left += 1
                elif text == expected[task]:
                    report.num_answered += 1
                else:
                    report.wrong.append(f"{len(task.prompt)} tokens: {text!r}")

        await asyncio.gather(*(work() for _ in range(num_clients)))
        report.seconds = time.monotonic() - begin
    return report


def check(server: LiveServer, report: LoadReport, num_requests: int) -> None:
    """AssertionError if an answer is missing or wrong, or a block has leaked."""
    assert not report.wrong, report.wrong[:3]
    assert report.num_answered + report.num_left == num_requests
    server.wait_until_idle()


def main() -> None:
    parser = argparse.ArgumentParser(description="Many streaming clients, some of which leave.")
    parser.add_argument("model", help="folder or GGUF file")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kv-cache-dtype", default="int8")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of the longest prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    longest = options.prompt_tokens + options.max_tokens
    with live_server(
        options.model,
        kv_cache_dtype=options.kv_cache_dtype,
        max_num_seqs=64,
        max_model_len=longest,
        kv_cache_memory_bytes=pool_bytes(options.model, options.kv_cache_dtype, 8 * longest),
    ) as server:
        vocab_size = server.serving.model.vocab_size
        tasks = make_tasks(vocab_size, 50, options.prompt_tokens, options.max_tokens)
        report = asyncio.run(run_load(server.url, tasks, options.clients, options.requests))
        check(server, report, options.requests)
        stats = server.serving.engine.latest_snapshot().stats
    print(
        json.dumps(
            {
                "benchmark": "server_load",
                "clients": options.clients,
                "requests": options.requests,
                "answered": report.num_answered,
                "left": report.num_left,
                "seconds": report.seconds,
                "gap_p50": report.percentile(50),
                "gap_p99": report.percentile(99),
                "preemptions": stats.num_preemptions,
            }
        )
    )


def pool_bytes(model: str, kv_cache_dtype: str, num_tokens: int) -> int:
    """Bytes of a pool for so many tokens."""
    llm = LLM(model, kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=64 << 20)
    plan = llm.engine.plan
    return -(-num_tokens // plan.block_size) * plan.bytes_per_block


if __name__ == "__main__":
    main()
