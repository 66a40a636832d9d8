"""Clients that leave, queues that are full, keys, an engine that dies, signals."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from live_server import PATIENCE, live_server, server_process, wait_until
from tightkv.config import ServerConfig
from tightkv.engine.llm_engine import LLMEngine
from tightkv.server.run import _bind
from tiny_models import save_tiny_model


class _PanicError(BaseException):
    """As libraries in Rust raise them."""


LONG = {"prompt": "abc", "temperature": 0, "max_tokens": 500, "ignore_eos": True}
COMPLETION = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def test_a_client_that_leaves_frees_its_blocks(folder: Path) -> None:
    with live_server(folder) as server, server.client() as client:
        for _ in range(3):
            with client.stream("POST", COMPLETION, json={**LONG, "stream": True}) as answer:
                next(answer.iter_lines())
            server.wait_until_idle()
        with pytest.raises(httpx.ReadTimeout):
            client.post(COMPLETION, json=LONG, timeout=0.05)
        server.wait_until_idle()
        assert server.call(lambda engine: engine.stats.generation_tokens) < 4 * 500


def test_a_first_token_does_not_wait_for_an_acknowledgement() -> None:
    """It follows the headers in a packet of its own, which the system would hold for 40 ms."""
    delays: list[bool] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        delays.append(not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def connect() -> None:
        listener = _bind(ServerConfig(port=0))
        async with await asyncio.start_server(on_connection, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await asyncio.wait_for(reader.read(), PATIENCE)
            writer.close()

    asyncio.run(connect())
    assert delays == [False]


def test_full_queue(folder: Path) -> None:
    go_on = threading.Event()
    answers: list[int] = []

    def ask() -> None:
        with server.client() as client:
            answers.append(client.post(COMPLETION, json=LONG).status_code)

    with live_server(folder, {"max_queue_len": 1}, max_num_seqs=1) as server:
        hold = threading.Thread(target=server.call, args=[lambda _: go_on.wait(PATIENCE)])
        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in (hold, *asking):
            thread.start()
        wait_until(lambda: server.serving.engine.num_unfinished == 2)
        with server.client() as client:
            refused = client.post(COMPLETION, json=LONG)
        go_on.set()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        for thread in (hold, *asking):
            thread.join(PATIENCE)
        assert answers == [200, 200]
        server.wait_until_idle()


def test_of_those_that_come_during_a_step_the_shortest_begins(folder: Path) -> None:
    go_on = threading.Event()
    order: list[int] = []

    def ask(num_tokens: int) -> None:
        with server.client() as client:
            body = {"prompt": [5] * num_tokens, "max_tokens": 4, "ignore_eos": True}
            assert client.post(COMPLETION, json=body).status_code == 200
            order.append(num_tokens)

    with live_server(folder, max_num_seqs=1) as server:
        threads = [threading.Thread(target=server.call, args=[lambda _: go_on.wait(PATIENCE)])]
        threads[0].start()
        for count, num_tokens in enumerate((30, 10, 20), start=1):
            threads.append(threading.Thread(target=ask, args=[num_tokens]))
            threads[-1].start()
            wait_until(partial(lambda n: server.serving.engine.num_unfinished == n, count))
        go_on.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert order == [10, 20, 30]


def test_api_keys(folder: Path) -> None:
    with live_server(folder, {"api_key": ("secret", "other")}) as server, server.client() as client:
        for path in ("/health", "/metrics", "/version", "/"):
            assert client.get(path).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for path in ("/v1/models", "/state", f"{server.url}//v1/models"):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for key in ("secret", "other"):
            answer = client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200


def test_no_cors_unless_asked(folder: Path) -> None:
    origin = {"Origin": "https://example.org"}
    with live_server(folder) as server, server.client() as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=origin).headers
    options = {"allowed_origins": ("https://example.org",), "api_key": ("k",)}
    with live_server(folder, options) as server, server.client() as client:
        asked = {**origin, "Access-Control-Request-Method": "POST"}
        answer = client.options("/v1/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://example.org"


def test_a_failed_step_ends_its_requests_alone(folder: Path) -> None:
    with live_server(folder) as server, server.client() as client:

        def break_once(engine: LLMEngine) -> None:
            execute = engine._runner.execute

            def broken(batch: Any) -> Any:
                engine._runner.execute = execute  # type: ignore[method-assign]
                raise RuntimeError("out of luck")

            engine._runner.execute = broken  # type: ignore[method-assign]

        server.call(break_once)
        failed = client.post(COMPLETION, json=LONG)
        assert failed.status_code == 500
        assert "out of luck" in failed.json()["error"]["message"]
        assert client.post(COMPLETION, json={**LONG, "max_tokens": 3}).status_code == 200
        server.wait_until_idle()


def test_a_form_that_leaves_nothing_to_sample_ends_its_request_alone(tmp_path: Path) -> None:
    """The model has ids below 100 only, and so none for an é."""
    small: dict[str, Any] = {
        "vocab_size": 100,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    folder = save_tiny_model(tmp_path / "llama", **small)
    with (
        live_server(folder) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as other,
    ):
        before = client.post(COMPLETION, json=LONG).json()["choices"][0]["text"]
        beside = other.submit(client.post, COMPLETION, json=LONG)
        asked = {"prompt": "abc", "max_tokens": 9, "min_tokens": 9}
        for regex, words in (("éa", "begins"), ("aaé", "structured_outputs")):
            answer = client.post(COMPLETION, json={**asked, "structured_outputs": {"regex": regex}})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert words in error["message"]
            assert "\n" not in error["message"]
        body = {**asked, "structured_outputs": {"regex": "aaé"}, "stream": True}
        answer = client.post(COMPLETION, json=body)
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert answer.status_code == 200
        first, *_, last = map(json.loads, events[:-1])
        assert first["choices"][0]["text"] == "a"
        assert last["error"]["type"] == "invalid_request_error"
        assert "structured_outputs" in last["error"]["message"]
        assert events[-1] == "[DONE]"
        assert beside.result(PATIENCE).json()["choices"][0]["text"] == before
        server.wait_until_idle()


def test_who_looks_on_may_fail(folder: Path) -> None:
    with live_server(folder) as server, server.client() as client:
        bug = mock.Mock(side_effect=ValueError("a bug of a metric"), __qualname__="on_finished")
        server.monitor.on_finished = bug  # type: ignore[method-assign]
        assert client.post(COMPLETION, json={**LONG, "max_tokens": 3}).status_code == 200
        server.wait_until_idle()


def test_prompts_are_logged_only_when_asked(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for asked in (False, True):
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, "tightkv"),
            live_server(folder, {"enable_log_requests": asked}) as server,
            server.client() as client,
        ):
            body = {"prompt": "a secret", "max_tokens": 2}
            headers = {"X-Request-Id": "mine"}
            answer = client.post(COMPLETION, json=body, headers=headers)
            assert answer.json()["id"].startswith("cmpl-mine-")
            client.get("/health%0AINFO forged")
            server.wait_until_idle()
            wait_until(lambda: "cmpl-mine-" in caplog.text)
        assert ("a secret" in caplog.text) is asked
        assert not any(line.startswith("INFO forged") for line in caplog.text.splitlines())


def test_an_engine_that_dies_says_so(folder: Path) -> None:
    with live_server(folder) as server, server.client() as client:
        died = threading.Event()
        server.serving.engine.on_death = died.set

        def kill(engine: LLMEngine) -> None:
            def schedule() -> Any:
                raise _PanicError

            engine.scheduler.schedule = schedule  # type: ignore[method-assign]

        server.call(kill)
        answer = client.post(COMPLETION, json=LONG)
        assert answer.status_code == 500
        assert "died" in answer.json()["error"]["message"]
        assert died.wait(PATIENCE)
        health = client.get("/health")
        assert health.status_code == 503
        assert "died" in health.json()["error"]["message"]
        assert client.post(COMPLETION, json=LONG).status_code == 500
        assert client.get("/metrics").status_code == 200
        assert client.get("/state").json()["server"]["healthy"] is False


def test_disorder_ends_the_engine_at_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not after some failed steps, as other errors do: what it would answer may be wrong."""
    with live_server(folder, debug_integrity=True) as server, server.client() as client:
        died = threading.Event()
        server.serving.engine.on_death = died.set
        assert client.post(COMPLETION, json={**LONG, "max_tokens": 3}).status_code == 200
        server.call(lambda engine: engine.manager._pool.allocate(1))  # for nobody
        answer = client.post(COMPLETION, json=LONG)
        assert answer.status_code == 500
        assert "IntegrityError" in answer.json()["error"]["message"]
        assert died.wait(PATIENCE)
        assert "leaks" in caplog.text


POOL = ("--kv-cache-memory-bytes", "4M")


def test_totals_when_it_stops(folder: Path) -> None:
    """With room for one of the sequences at its end, and no token reserved."""
    pool: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 18, "swap_space": 0.001}
    with live_server(folder, **pool, preemption_mode="swap") as server, server.client() as client:
        server.call(lambda engine: setattr(engine.scheduler, "num_reserved_tokens", 0))
        body = {**LONG, "prompt": ["abc", "def"], "max_tokens": 400}
        assert client.post(COMPLETION, json=body).status_code == 200
    totals, stats = server.monitor.totals(), server.monitor._latest_snapshot().stats
    assert stats.num_swaps > 0
    assert totals.startswith("2 requests, 6 prompt tokens and 800 generated; ")
    assert f"; {stats.num_preemptions} preemptions, by which 0 tokens were lost; " in totals
    out, back = re.findall(r"(?:swapped out|in) ([\d,]+)", totals)
    assert int(out.replace(",", "")) >= int(back.replace(",", "")) > 1000


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish(folder: Path) -> None:
    with server_process(str(folder), *POOL) as (process, url):
        client = httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False)
        body = {**LONG, "stream": True}
        with client, client.stream("POST", COMPLETION, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_kill_and_start_again(folder: Path) -> None:
    with server_process(str(folder), *POOL) as (process, _):
        process.kill()
    with server_process(str(folder), *POOL) as (process, url):
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            assert client.post(COMPLETION, json={**LONG, "max_tokens": 3}).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


_DYING = """
import sys
from tightkv.cli.main import main
from tightkv.engine.llm_engine import LLMEngine
LLMEngine.step = None
sys.exit(main())
"""


@pytest.mark.slow
def test_the_process_of_a_dead_engine_ends(folder: Path) -> None:
    with server_process(str(folder), *POOL, program=("-c", _DYING)) as (process, url):
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            assert client.post(COMPLETION, json=LONG).status_code == 500
            assert client.get("/health").status_code == 503
        assert process.wait(PATIENCE) == 1
