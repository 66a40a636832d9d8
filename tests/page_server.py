"""A server over loopback that gives the page canned answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from engine_states import state

WORDS = ["Paged", " attention", " keeps", " K", " and", " V", " in", " blocks", "."]


class PageServer(ThreadingHTTPServer):
    """Gives the page, `state`, and a stream of `words`.

    Attributes:
        state: what `GET /state` answers.
        status: HTTP status of `GET /state`.
        api_key: which requests must have; None: none.
        words: of the answer, one event each.
        pause: seconds before each word.
        bodies: what was posted, with the path.
        was_left: set when a client leaves before the end of its stream.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.state: Any = state()
        self.status = 200
        self.api_key: str | None = None
        self.words = WORDS
        self.pause = 0.01
        self.stream_error: str | None = None
        self.bodies: list[tuple[str, Any]] = []
        self.was_left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


@contextmanager
def page_server() -> Iterator[PageServer]:
    server = PageServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/":
            page = files("tightkv.server").joinpath("page/index.html").read_bytes()
            self._answer(200, page, "text/html; charset=utf-8")
        elif self.path != "/state":
            self._answer_json(404, {"error": {"message": "No such page."}})
        elif self._may():
            self._answer_json(self.server.status, self.server.state)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may():
            return
        self.server.bodies.append((self.path, body))
        if body["max_tokens"] > 1000:
            self._answer_json(400, {"error": {"message": "max_tokens is <i>too many</i>."}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        try:
            for event in self._events():
                time.sleep(self.server.pause)
                self.wfile.write(f"data: {event}\n\n".encode())
                self.wfile.flush()
        except OSError:
            self.server.was_left.set()

    def _events(self) -> Iterator[str]:
        chat = "chat" in self.path
        for word in self.server.words:
            choice = {"delta": {"content": word}} if chat else {"text": word}
            yield json.dumps({"choices": [{"index": 0, **choice}]})
        if self.server.stream_error:
            yield json.dumps({"error": {"message": self.server.stream_error}})
            return
        number = len(self.server.words)
        details = {"cached_tokens": 32}
        usage = {"prompt_tokens": 41, "completion_tokens": number, "prompt_tokens_details": details}
        yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"

    def _may(self) -> bool:
        key = self.server.api_key
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            return True
        self._answer_json(401, {"error": {"message": "The API key is missing or wrong."}})
        return False

    def _answer_json(self, status: int, content: Any) -> None:
        self._answer(status, json.dumps(content).encode(), "application/json")

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
