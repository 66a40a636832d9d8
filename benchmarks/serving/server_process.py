"""Servers as processes: one is started, answers a load, and is ended with all it has started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from benchmarks.serving.driver import Result, progress
from benchmarks.serving.engines import ROOT, Engine, EngineFailure, end_session, last_words

__all__ = ["MODEL_NAME", "Server"]

MODEL_NAME = "served"
HOST = "127.0.0.1"
READY_SECONDS = 600
FAREWELL_SECONDS = 20
SHOWN_LINES = 20


@dataclass(frozen=True)
class Server(Engine):
    """An engine's server, which `python -m MODULE FLAGS` starts.

    Attributes:
        flags: of the command; the port comes after them.
        body: fields that make its requests greedy and as long as asked.
    """

    flags: tuple[str, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)

    def run(self, work: str, **options: Any) -> Result:
        """Start the server, and let a client of its own process do the work.

        Args:
            work: what the client calls it.
            options: flags of the client.

        Returns:
            What the client found, the machine's load in the last minute, and after how many
            seconds the server was ready.

        Raises:
            EngineFailure: if there is no such engine, or the server or the client failed.
        """
        if self.python is None:
            raise EngineFailure(f"not given: set {self.variable}")
        client = Engine("client", "load_client", model=MODEL_NAME)
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            try:
                with self._running(log) as (url, ready_seconds):
                    result = client.run(work, url=url, body=json.dumps(self.body), **options)
            except EngineFailure:
                _show_end(self.name, log)
                raise
        return {**result, "ready_seconds": ready_seconds}

    @contextmanager
    def _running(self, log: IO[str]) -> Iterator[tuple[str, float]]:
        """The server's address, and the seconds until it was ready."""
        port = _free_port()
        assert self.python is not None
        start = time.perf_counter()
        try:
            process = subprocess.Popen(
                [self.python, "-m", self.module, *self.flags, "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        except OSError as error:
            raise EngineFailure(f"cannot be started: {self.python}: {error.strerror}") from error
        try:
            url = f"http://{HOST}:{port}"
            _wait_until_ready(process, url, log)
            yield url, time.perf_counter() - start
        finally:
            # Politely first: then engines remove what they hold in shared memory.
            process.terminate()
            try:
                process.wait(FAREWELL_SECONDS)
            except subprocess.TimeoutExpired:
                progress(f"{self.name} does not end by itself")
            finally:
                end_session(process.pid)
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: IO[str]) -> None:
    # No proxy stands between us and ourselves.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise EngineFailure(f"ended with status {process.returncode}: {last_words(log)}")
        try:
            with opener.open(f"{url}/v1/models", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise EngineFailure(f"was not ready after {READY_SECONDS} seconds: {last_words(log)}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def _show_end(name: str, log: IO[str]) -> None:
    log.seek(0)
    lines = log.readlines()[-SHOWN_LINES:]
    print(f"The log of {name} ends:\n" + "".join(lines), end="", file=sys.stderr, flush=True)
