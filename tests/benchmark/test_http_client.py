"""The HTTP client, against answers that are written byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from tightkv.benchmark.http_client import HttpError, Response, parse_address, send
from tightkv.errors import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def answered(pieces: Sequence[bytes], *, hangs_up: bool = True, timeout: float = 20.0) -> Response:
    """What the client makes of a server that sends these pieces, one after the other."""
    seen: list[bytes] = []
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        if not hangs_up:
            await reader.read()  # until the client does
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        closed.set()

    async def ask() -> Response:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            address = parse_address(f"http://127.0.0.1:{port}/base/")
            try:
                return await send(address, "POST", "/x", b"{}", {"X-Own": "1"}, timeout)
            finally:
                await closed.wait()

    response = asyncio.run(ask())
    assert seen[0].startswith(b"POST /base/x HTTP/1.1\r\n")
    assert b"\r\nX-Own: 1\r\n" in seen[0]
    return response


@pytest.mark.parametrize("hangs_up", [True, False])
def test_chunks_keep_their_times(hangs_up: bool) -> None:
    pieces = [CHUNKED[:30], CHUNKED[30:] + b"5\r\nab", b"cde\r\n3;x=y\r\nfgh\r", b"\n0\r\n\r\n"]
    response = answered(pieces, hangs_up=hangs_up)
    assert (response.status, response.reason, response.text) == (200, "OK", "abcdefgh")
    assert [data for _, data in response.chunks] == [b"ab", b"cdefgh"]
    times = [time for time, _ in response.chunks]
    assert response.start < times[0] < times[1]


def test_a_length_ends_the_answer() -> None:
    head = b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\n"
    response = answered([head + b"n", b"o!"], hangs_up=False)
    assert (response.status, response.reason, response.text) == (404, "Not Found", "no!")


def test_a_size_may_come_in_two_pieces() -> None:
    response = answered([CHUNKED + b"1", b"0\r\n0123456789abcdef\r\n0\r\n\r\n"])
    assert response.text == "0123456789abcdef"


@pytest.mark.parametrize(
    ("pieces", "said"),
    [([], "without an answer"), ([b"SSH-2.0-x\r\n\r\n"], "no HTTP")],
)
def test_what_is_no_answer(pieces: Sequence[bytes], said: str) -> None:
    with pytest.raises(HttpError, match=said):
        answered(pieces)


def test_time_runs_out() -> None:
    with pytest.raises(HttpError, match=r"within 0\.2 seconds"):
        answered([HEAD], hangs_up=False, timeout=0.2)


def test_nobody_listens() -> None:
    async def ask() -> Response:
        return await send(parse_address("http://127.0.0.1:1"), "GET", "/")

    with pytest.raises(HttpError, match=r"http://127\.0\.0\.1:1 does not answer"):
        asyncio.run(ask())


def test_addresses() -> None:
    address = parse_address("https://example.org/v1/")
    assert (address.port, address.is_secure, address.name) == (
        443,
        True,
        "https://example.org:443/v1",
    )
    assert parse_address("http://h:8000").port == 8000
    for url in ("localhost:8000", "ftp://x", "http://", "http://h:port"):
        with pytest.raises(ConfigError, match="--base-url"):
            parse_address(url)
