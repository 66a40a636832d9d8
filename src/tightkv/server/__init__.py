"""The HTTP server: OpenAI's API, metrics, and a page that shows the KV cache at work."""

from tightkv.server.async_engine import AsyncEngine
from tightkv.server.run import run_server

__all__ = ["AsyncEngine", "run_server"]
