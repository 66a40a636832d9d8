"""What the answers of both APIs have in common: requests in, pieces out, whole or streamed."""

from __future__ import annotations

import abc
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tightkv.engine.outputs import CompletionDelta
from tightkv.engine.sampling_params import SamplingParams
from tightkv.server.async_engine import Prompt
from tightkv.server.errors import json_response
from tightkv.server.logprobs import TokenLogprobs
from tightkv.server.protocol import SamplingRequest, StreamOptions
from tightkv.server.serving import Serving, merged, new_id, unless_gone
from tightkv.server.streaming import event_stream
from tightkv.server.usage import Usage

__all__ = ["Answer", "Piece"]

Piece = dict[str, Any]
"""One of the `choices` of a chunk."""


class Answer(abc.ABC):
    """The choices of a request: `n` for each of its prompts.

    Generators are closed at every level, so that a client that leaves ends its requests at once.
    """

    def __init__(
        self,
        serving: Serving,
        body: SamplingRequest,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        http: Request,
        id_prefix: str,
    ) -> None:
        self._serving, self._prompts, self._params = serving, prompts, params
        self._http, self._cache_salt = http, body.cache_salt or ""
        self._priority = body.priority or 0
        self._streams = bool(body.stream)
        self._stream_options = body.stream_options or StreamOptions()
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs | None]] = {}
        self._usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        self._head: dict[str, Any] = {
            "id": new_id(id_prefix, http),
            "created": int(time.time()),
            "model": serving.name,
        }

    async def response(self) -> Response:
        """The answer, whole or as a stream; its errors come before anything has been sent.

        Raises:
            RequestError, QueueFullError, EngineError: as `AsyncEngine.submit` does.
            ClientGoneError: if nobody waits any more.
        """
        await self._serving.compile_grammar(self._params)
        if self._streams:
            return await unless_gone(self._http, event_stream(self._chunks()))
        return json_response(await unless_gone(self._http, self._whole()))

    @property
    @abc.abstractmethod
    def _chunk_object(self) -> str:
        """What OpenAI calls a piece of a stream."""

    @abc.abstractmethod
    async def _whole(self) -> dict[str, Any]:
        """The answer as one object."""

    @abc.abstractmethod
    def _pieces(self) -> AsyncGenerator[Piece]:
        """Pieces of the choices, as they come."""

    async def _chunks(self) -> AsyncGenerator[dict[str, Any]]:
        head = {**self._head, "object": self._chunk_object}
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                chunk = {**head, "choices": [piece]}
                if self._stream_options.continuous_usage_stats:
                    chunk["usage"] = self._usage.as_json()
                yield chunk
        if self._stream_options.include_usage:
            yield {**head, "choices": [], "usage": self._usage.as_json()}

    async def _completions(self) -> AsyncGenerator[tuple[int, CompletionDelta]]:
        """Index of the prompt, and what came to one of its completions."""
        submitted = self._serving.submitted(
            self._head["id"],
            self._prompts,
            self._params,
            cache_salt=self._cache_salt,
            priority=self._priority,
        )
        async with submitted as streams, aclosing(merged(streams)) as deltas:
            async for which, delta in deltas:
                self._usage.note(which, delta)
                if delta.prompt_logprobs is not None:
                    self._prompt_logprobs[which] = delta.prompt_logprobs
                for completion in delta.completions:
                    yield which, completion
