"""The server as an ASGI application."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from tightkv.config import ServerConfig
from tightkv.server.errors import add_handlers
from tightkv.server.middleware import AccessLog, ApiKeys, BodyLimit, SingleSlashes
from tightkv.server.monitor import Monitor
from tightkv.server.routes import make_router
from tightkv.server.serving import Serving

__all__ = ["API_KEY_VARIABLE", "make_app"]

API_KEY_VARIABLE = "TIGHTKV_API_KEY"


def make_app(serving: Serving, monitor: Monitor) -> FastAPI:
    """The application; its lifespan starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        serving.engine.start()
        yield
        await serving.engine.stop()
        serving.close()

    # The documentation pages of FastAPI load scripts from elsewhere; /openapi.json stays.
    app = FastAPI(
        title="TightKV",
        version=version("tightkv"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(make_router(serving, monitor))
    add_handlers(app, monitor.metrics.on_rejected)
    _add_middleware(app, serving.config)
    return app


def _add_middleware(app: FastAPI, config: ServerConfig) -> None:
    """From the inside out: the last one added sees a request first."""
    app.add_middleware(BodyLimit, max_bytes=config.max_request_bytes)
    keys = [*config.api_key, *filter(None, [os.environ.get(API_KEY_VARIABLE)])]
    if keys:
        app.add_middleware(ApiKeys, keys=keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(SingleSlashes)
    app.add_middleware(AccessLog)
