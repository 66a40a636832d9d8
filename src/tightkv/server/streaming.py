"""Answers in pieces: server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from tightkv.server.errors import as_error

__all__ = ["event_stream"]

_DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def event_stream(chunks: AsyncGenerator[dict[str, Any]]) -> StreamingResponse:
    """A stream of these objects, ended by `[DONE]`.

    The first is awaited here, so that a request that is refused gets a status of its own. An error
    after it is the stream's last object.
    """
    try:
        first = await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise
    return StreamingResponse(
        _events(first, chunks), media_type="text/event-stream", headers=_HEADERS
    )


async def _events(
    first: dict[str, Any], chunks: AsyncGenerator[dict[str, Any]]
) -> AsyncIterator[bytes]:
    try:
        yield _event(first)
        async for chunk in chunks:
            yield _event(chunk)
    except Exception as error:
        yield _event(as_error(error)[1])
    finally:
        # The client may have gone: what it asked for must not go on.
        await chunks.aclose()
    yield _DONE


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
