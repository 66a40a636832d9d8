"""Some clients at once, each of which sends a request when its last one is answered.

    python -m benchmarks.serving.load_client load --model NAME --url URL --requests FILE --clients N

The requests go out in the file's order, whatever server answers; those of `alone` come last, from
one client. The last line of stdout is one JSON object. What arrives is only kept, with its time,
and read when all is over, so that the client takes little of the processor that it shares with the
server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.driver import progress
from benchmarks.serving.stream_times import Answer, read_answer, summarize
from tightkv.benchmark.http_client import Chunk
from tightkv.benchmark.stream import StreamError

TIMEOUT_SECONDS = 1800.0
SHOWN_ERRORS = 3


@dataclass
class Sent:
    """A request on its way, and what came of it."""

    body: dict[str, Any]
    start: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    error: str = ""

    def answer(self) -> Answer | str:
        """What came back, or what was wrong with it."""
        if self.error:
            return self.error
        try:
            return read_answer(self.start, self.chunks, self.body["max_tokens"])
        except StreamError as error:
            return str(error)


async def send(client: httpx.AsyncClient, request: Sent) -> None:
    request.start = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=request.body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                request.error = f"status {response.status_code}: {text[:200]}"
            async for data in response.aiter_raw():
                request.chunks.append((time.perf_counter(), data))
    except httpx.HTTPError as error:
        request.error = f"{type(error).__name__}: {error}"


async def send_all(client: httpx.AsyncClient, requests: Sequence[Sent], num_clients: int) -> float:
    """Send all, `num_clients` at a time; seconds from the first request to the last answer."""
    queue: Iterator[Sent] = iter(requests)

    async def work() -> None:
        for request in queue:  # shared: each request is taken once
            await send(client, request)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(num_clients)))
    return time.perf_counter() - start


async def load(options: argparse.Namespace) -> dict[str, Any]:
    document = json.loads(options.requests.read_text(encoding="utf-8"))
    common = {**json.loads(options.body), "model": options.model, "stream": True, "temperature": 0}
    warm_up, requests, one_by_one = (
        [Sent({**common, **each}) for each in document[kind]]
        for kind in ("warm_up", "requests", "alone")
    )
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=options.url, timeout=TIMEOUT_SECONDS, limits=limits, trust_env=False
    ) as client:
        progress(f"warming up with {len(warm_up)} requests")
        await send_all(client, warm_up, options.clients)
        result = await _measure(client, requests, options.clients)
        alone = await _measure(client, one_by_one, 1)
        return {"version": await _version(client), **result, "alone": alone}


async def _measure(
    client: httpx.AsyncClient, requests: Sequence[Sent], num_clients: int
) -> dict[str, Any]:
    progress(f"sending {len(requests)} requests, {num_clients} at a time")
    seconds = await send_all(client, requests, num_clients)
    read = [request.answer() for request in requests]
    answers = [answer for answer in read if isinstance(answer, Answer)]
    errors = [error for error in read if isinstance(error, str)]
    if not answers:
        raise RuntimeError(f"no request was answered: {errors[0]}")
    result = summarize(answers, seconds)
    if result["prompt_tokens"] is None:
        result["prompt_tokens"] = await _counted(client, requests)
    return {**result, "failed": len(errors), "errors": errors[:SHOWN_ERRORS]}


async def _counted(client: httpx.AsyncClient, requests: Sequence[Sent]) -> int | None:
    """Tokens of all prompts by llama-cpp-python's tokenizer; None where the server has no such."""
    count = 0
    for request in requests:
        response = await client.post(
            "/extras/tokenize/count", json={"input": request.body["prompt"]}
        )
        if response.status_code != 200:
            return None
        count += response.json()["count"]
    return count


async def _version(client: httpx.AsyncClient) -> str:
    """Of the server: its own route for that, or what its OpenAPI document says."""
    response = await client.get("/version")
    if response.status_code == 200:
        return str(response.json()["version"])
    return str((await client.get("/openapi.json")).json()["info"]["version"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Sends requests to a server, and takes times.")
    parser.add_argument("work", choices=["load"])
    parser.add_argument("--model", required=True, help="name in the requests")
    parser.add_argument("--url", required=True)
    parser.add_argument(
        "--requests", type=Path, required=True, help="JSON: warm_up, requests, alone"
    )
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--body", default="{}", help="JSON: fields of every request")
    print(json.dumps(asyncio.run(load(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
