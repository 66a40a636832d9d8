"""The routes of the server."""

from __future__ import annotations

from importlib import metadata
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from tightkv.server.chat import chat_prompt, create_chat_completion
from tightkv.server.completion import create_completion
from tightkv.server.errors import error_response, json_response
from tightkv.server.monitor import Monitor
from tightkv.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tightkv.server.serving import ClientGoneError, Serving

__all__ = ["make_router"]

_CLIENT_GONE = 499  # nginx's number, for the log alone


def make_router(serving: Serving, monitor: Monitor) -> APIRouter:
    """All routes, for one model."""
    router = APIRouter()
    _add_completions(router, serving)
    _add_tokens(router, serving)
    _add_state(router, serving, monitor)
    return router


def _add_completions(router: APIRouter, serving: Serving) -> None:
    @router.get("/v1/models")
    async def list_models() -> Response:
        """The model, under each of its names."""
        return json_response({"object": "list", "data": [_card(serving, n) for n in serving.names]})

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        """The model under this name."""
        serving.check_model(name)
        return json_response(_card(serving, name))

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continue one or several prompts."""
        try:
            return await create_completion(serving, body, http)
        except ClientGoneError:
            return Response(status_code=_CLIENT_GONE)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, http: Request) -> Response:
        """Answer a conversation."""
        try:
            return await create_chat_completion(serving, body, http)
        except ClientGoneError:
            return Response(status_code=_CLIENT_GONE)


def _add_tokens(router: APIRouter, serving: Serving) -> None:
    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a prompt or of a conversation."""
        serving.check_model(body.model)
        if body.prompt is not None:
            prompt = await serving.tokenize(body.prompt, body.add_special_tokens is not False)
        else:
            prompt = await chat_prompt(serving, body, body.messages or [])
        ids = prompt.token_ids
        strings = await serving.token_strings(ids) if body.return_token_strs else None
        return json_response(
            {
                "count": len(ids),
                "max_model_len": serving.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids."""
        serving.check_model(body.model)
        return json_response({"prompt": await serving.detokenize(body.tokens)})


def _add_state(router: APIRouter, serving: Serving, monitor: Monitor) -> None:
    @router.get("/health")
    async def health() -> Response:
        """200 while the engine lives, 503 when it has died."""
        if serving.engine.is_healthy:
            return json_response({"status": "ok"})
        return error_response(503, serving.engine.error or "The engine does not run.")

    @router.get("/version")
    async def version() -> Response:
        """TightKV's version."""
        return json_response({"version": metadata.version("tightkv")})

    @router.get("/metrics")
    async def metrics(http: Request) -> Response:
        """Metrics for Prometheus."""
        body, content_type = monitor.metrics.render(http.headers.get("accept"))
        return Response(body, headers={"Content-Type": content_type})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Forget what blocks hold; running requests go on."""
        await serving.engine.call(lambda engine: engine.manager.reset_prefix_cache())
        return json_response({"status": "ok"})

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(files("tightkv.server").joinpath("page/index.html").read_text("utf-8"))

    @router.get("/state")
    async def get_state() -> Response:
        """What the page shows."""
        return json_response(monitor.state(serving.engine))


def _card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "tightkv",
        "root": serving.model.name,
        "parent": None,
        "max_model_len": serving.max_model_len,
    }
