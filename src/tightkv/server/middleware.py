"""What happens to every request before its route: paths, keys, size, an id, a line in the log."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tightkv.server.errors import as_error, error_response, json_response

__all__ = ["AccessLog", "ApiKeys", "BodyLimit", "SingleSlashes"]

_access_logger = logging.getLogger("tightkv.access")

_PUBLIC_PATHS = frozenset({"/", "/health", "/metrics", "/version"})
"""They tell nothing of requests; probes and Prometheus bring no key."""

_ROUTINE_PATHS = frozenset({"/health", "/metrics", "/state"})

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class SingleSlashes:
    """`//v1/models` is `/v1/models`: base URLs are often given with a slash too many."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "//" in scope["path"]:
            path = re.sub("/{2,}", "/", scope["path"])
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


class AccessLog:
    """Gives each request an id, which its answer carries, and logs one line when it is answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["http_request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status:  # too late for another answer
                raise
            _, body = as_error(error)
            await json_response(body, 500)(scope, receive, send_with_id)
        finally:
            # What probes and the page ask every second would bury the rest.
            is_routine = scope["path"] in _ROUTINE_PATHS and status == 200
            _access_logger.log(
                logging.DEBUG if is_routine else logging.INFO,
                "%s %s %s %s %.0f ms %s",
                (scope.get("client") or ("-",))[0],
                scope["method"],
                quote(scope["path"]),  # as it came: a line break in it would forge a line
                status or "no answer",
                1000 * (time.monotonic() - begin),
                request_id,
            )


class ApiKeys:
    """Asks for one of the keys, compared in constant time, except on paths that tell nothing."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        response = error_response(
            401,
            "The API key is missing or wrong: send one as Authorization: Bearer KEY.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        # A browser asks without a key whether it may send one.
        return scope["path"] in _PUBLIC_PATHS or scope["method"] == "OPTIONS"

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Every key is compared, so that the time tells nothing.
        matches = [hmac.compare_digest(given.strip().encode("latin-1"), k) for k in self._keys]
        return any(matches)


class BodyLimit:
    """Refuses a body that is too long, as soon as it is known to be."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        messages: list[Message] = []
        num_bytes = 0
        while True:
            message = await receive()
            messages.append(message)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                await self._refuse(scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        replay: Callable[[], Message] = iter(messages).__next__

        async def receive_again() -> Message:
            try:
                return replay()
            except StopIteration:
                return await receive()

        await self._app(scope, receive_again, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The connection stays: closed with a body still on its way it is reset, which takes the
        # answer from the client. uvicorn drops the rest of the body.
        response = error_response(
            413,
            f"The body is longer than {self._max_bytes} bytes (--max-request-bytes): shorten it.",
        )
        await response(scope, receive, send)


def _request_id(given: str | None) -> str:
    """The client's own, if it can stand in a log and a header; a new one otherwise."""
    return given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
