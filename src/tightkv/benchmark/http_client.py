"""Just enough of HTTP/1.1 to send a request and to note when each piece of its answer arrives.

What arrives is kept with its time, and read when all is over, so that the client takes little of
the processor, which it often shares with the server. Each request has a connection of its own; its
clock starts when the connection stands.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tightkv.errors import ConfigError

__all__ = ["Address", "Chunk", "HttpError", "Response", "parse_address", "send"]

Chunk = tuple[float, bytes]
"""Seconds of `time.perf_counter()`, and what arrived then."""

_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_FAREWELL_SECONDS = 1.0


class HttpError(Exception):
    """No answer, or none that can be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens.

    Attributes:
        path: what stands before each route, without a slash at its end.
    """

    host: str
    port: int
    is_secure: bool
    path: str

    @property
    def name(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self.host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, whole.

    Attributes:
        start: when the request was sent.
        chunks: of the body, each with the time at which it came.
    """

    start: float
    status: int
    reason: str
    chunks: tuple[Chunk, ...]

    @property
    def text(self) -> str:
        return b"".join(data for _, data in self.chunks).decode(errors="replace")


def parse_address(url: str) -> Address:
    """The address in a URL.

    Raises:
        ConfigError: if it is not one of http or https.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--base-url is {url!r}: give a server's address, as http://127.0.0.1:8000."
        )
    is_secure = parts.scheme == "https"
    default = 443 if is_secure else 80
    return Address(parts.hostname, port or default, is_secure, parts.path.rstrip("/"))


async def send(
    address: Address,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    timeout: float = 3600.0,
) -> Response:
    """Send a request and wait for the whole answer.

    Raises:
        HttpError: if there is none, or it is no HTTP.
    """
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if address.is_secure else None
    try:
        transport, exchange = await loop.create_connection(
            lambda: _Exchange(loop), address.host, address.port, ssl=context
        )
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise HttpError(f"{address.name} does not answer ({reason})") from error
    start = time.perf_counter()
    try:
        transport.write(_request(address, method, path, body, headers or {}))
        await asyncio.wait_for(exchange.finished, timeout)
    except TimeoutError:
        raise HttpError(f"{address.name} did not finish within {timeout:g} seconds") from None
    finally:
        transport.close()
        # Nothing of it may outlive the loop; a secure connection takes its time to say goodbye.
        await asyncio.wait([exchange.closed], timeout=_FAREWELL_SECONDS)
        transport.abort()
    return _read(start, exchange.chunks)


class _Exchange(asyncio.Protocol):
    """Notes what arrives, and sees when it is all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.chunks: list[Chunk] = []
        self.finished: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._head = b""
        self._tail = b""
        self._length: int | None = None
        self._num_bytes = 0

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.perf_counter(), data))
        if self._is_last(data):
            self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(error)
        self.closed.set_result(None)

    def _is_last(self, data: bytes) -> bool:
        """Whether the answer is whole, for servers that do not hang up."""
        if not self._tail:
            self._head += data
            head, found, data = self._head.partition(_HEAD_END)
            if not found:
                return False
            self._length = _content_length(_headers(head))
            self._tail = _HEAD_END
        self._num_bytes += len(data)
        if self._length is not None:
            return self._num_bytes >= self._length
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        return self._tail.endswith(_LAST_CHUNK)

    def _finish(self, error: Exception | None) -> None:
        if self.finished.done():
            return
        if error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(HttpError(f"the connection broke ({error})"))


def _request(
    address: Address, method: str, path: str, body: bytes, headers: Mapping[str, str]
) -> bytes:
    fields = {
        "Host": f"{address.host}:{address.port}",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **headers,
    }
    lines = [f"{method} {address.path}{path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _read(start: float, chunks: Iterable[Chunk]) -> Response:
    """Head and body of what arrived."""
    head, body, is_body = b"", list[Chunk](), False
    for moment, data in chunks:
        if not is_body:
            head, found, data = (head + data).partition(_HEAD_END)
            is_body = bool(found)
        if is_body and data:
            body.append((moment, data))
    first, *_ = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status, _, reason = rest.partition(" ")
    if not version.startswith("HTTP/") or not status.isdigit():
        raise HttpError(
            "the answer is no HTTP" if head else "the connection ended without an answer"
        )
    if "chunked" in _headers(head).get("transfer-encoding", ""):
        body = [*_unchunked(body)]
    return Response(start, int(status), reason, tuple(body))


def _headers(head: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
    return {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


def _content_length(headers: Mapping[str, Any]) -> int | None:
    length = str(headers.get("content-length", ""))
    return int(length) if length.isdigit() else None


def _unchunked(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The body without the sizes that HTTP's chunks have in front; each part keeps its time."""
    rest, missing = b"", 0
    for moment, data in chunks:
        rest += data
        part = b""
        while rest:
            if missing == 0:
                size, found, after = rest.partition(b"\r\n")
                if not found:
                    break
                if size:  # a chunk's own line end comes before the next size
                    missing = int(size.split(b";")[0], 16)
                    if missing == 0:
                        break
                rest = after
                continue
            taken, rest = rest[:missing], rest[missing:]
            part, missing = part + taken, missing - len(taken)
        if part:
            yield moment, part
