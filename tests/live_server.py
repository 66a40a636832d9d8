"""The server over loopback, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn

from tightkv.config import EngineConfig, ServerConfig
from tightkv.engine.llm_engine import LLMEngine
from tightkv.server.app import make_app
from tightkv.server.monitor import Monitor
from tightkv.server.run import load_serving
from tightkv.server.serving import Serving

_T = TypeVar("_T")

PATIENCE = 60.0
"""Seconds after which a test gives up."""


@dataclass
class LiveServer:
    """A running server, and its parts."""

    url: str
    serving: Serving
    monitor: Monitor
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[LLMEngine], _T]) -> _T:
        """Run a function of the engine, in its thread."""
        coroutine = self.serving.engine.call(function)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, **options)

    def wait_until_idle(self) -> None:
        """Wait until nothing is left in the engine, and check that nothing has leaked."""
        wait_until(lambda: self.serving.engine.num_unfinished == 0)
        self.call(_check_empty)


@contextmanager
def live_server(
    model: Path | str, server_options: dict[str, Any] | None = None, **options: Any
) -> Iterator[LiveServer]:
    """A server of this model; `options` are the engine's."""
    options = {"max_num_seqs": 4, "kv_cache_memory_bytes": 4 << 20, **options}
    serving, monitor = load_serving(
        EngineConfig.from_options({"model": str(model), **options}),
        ServerConfig(**{"served_model_name": ("tiny",), **(server_options or {})}),
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        make_app(serving, monitor), log_config=None, access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = listener.getsockname()[1]
        yield LiveServer(f"http://127.0.0.1:{port}", serving, monitor, loops[0])
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()
    assert not thread.is_alive(), "the server does not stop"


@contextmanager
def server_process(
    *arguments: str, program: tuple[str, ...] = ("-m", "tightkv")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`tightkv serve` on a free port, and its address; it is told to stop at the end."""
    process = subprocess.Popen(
        [sys.executable, *program, "serve", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr as log:
        url = next((line.split(" at ")[1].strip() for line in log if " at http" in line), "")
        assert url, f"the server does not start, status {process.wait(PATIENCE)}"
        # Nobody reads the log any more, and a full pipe would stop the server.
        drain = subprocess.Popen(["cat"], stdin=log, stdout=subprocess.DEVNULL)
        try:
            yield process, url
        finally:
            process.terminate()
            process.wait(PATIENCE)
            drain.wait(PATIENCE)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; AssertionError if it does not come true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def _check_empty(engine: LLMEngine) -> None:
    engine.manager.check_integrity()
    assert engine.manager.num_sequences == 0
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    assert not engine.requests
