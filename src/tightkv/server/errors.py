"""Errors in the shape that OpenAI's clients know."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tightkv.errors import RequestError, TightKVError
from tightkv.server.async_engine import QueueFullError

__all__ = ["ModelNotFoundError", "add_handlers", "as_error", "error_response", "json_response"]

_logger = logging.getLogger("tightkv")

_RETRY_AFTER_SECONDS = "1"
_LONGEST_GIVEN = 60

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    503: "overloaded_error",
}


_REJECTED_AS = {400: "invalid", 404: "unknown_model", 503: "queue_full"}


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON answer in ASCII, so that no text can break it."""
    return Response(json.dumps(content), status, headers, media_type="application/json")


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    return json_response(_body(status, message, param, code), status, headers)


def as_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an error that ends a request."""
    if isinstance(error, ModelNotFoundError):
        return 404, _body(404, str(error), "model", "model_not_found")
    if isinstance(error, QueueFullError):
        return 503, _body(503, str(error), None, "queue_full")
    if isinstance(error, RequestError):
        return 400, _body(400, str(error), None, None)
    if not isinstance(error, TightKVError):
        _logger.error("a request failed", exc_info=error)
        return 500, _body(500, "The server failed; its log says why.", None, None)
    return 500, _body(500, str(error), None, "engine_error")


def add_handlers(app: FastAPI, on_rejected: Callable[[str], None]) -> None:
    """Let every error of the app be answered in this shape.

    Args:
        app: the application.
        on_rejected: told in a word why a request was not served.
    """

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> Response:
        param, message = _first_of(error)
        on_rejected(_REJECTED_AS[400])
        return error_response(400, message, param=param)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> Response:
        message = error.detail
        if error.status_code == 404:
            message = f"There is no {request.url.path}: see /openapi.json for what there is."
        elif error.status_code == 405:
            message = f"{request.url.path} does not answer {request.method}: see /openapi.json."
        return error_response(error.status_code, message, headers=dict(error.headers or {}))

    @app.exception_handler(TightKVError)
    async def _(request: Request, error: TightKVError) -> Response:
        status, body = as_error(error)
        if status in _REJECTED_AS:
            on_rejected(_REJECTED_AS[status])
        headers = {"Retry-After": _RETRY_AFTER_SECONDS} if status == 503 else None
        return json_response(body, status, headers)


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _first_of(error: RequestValidationError) -> tuple[str | None, str]:
    """Field and sentence of the first thing that is wrong."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return None, f"The body is no JSON: {first['ctx']['error']}."
    if isinstance(first["input"], bytes):
        return None, "The body was not sent as JSON: set Content-Type: application/json."
    where = ".".join(str(part) for part in first["loc"][1:])
    what = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return where, f"Unknown field {where}: leave it out."
    given = "" if first["type"] in ("missing", "value_error") else f", got {_shown(first['input'])}"
    return where or None, f"{where + ': ' if where else ''}{what}{given}."


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_GIVEN else text[: _LONGEST_GIVEN - 1] + "…"
