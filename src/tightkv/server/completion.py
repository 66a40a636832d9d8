"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tightkv.engine.outputs import CompletionDelta
from tightkv.engine.sampling_params import SamplingParams
from tightkv.server.answer import Answer, Piece
from tightkv.server.async_engine import Prompt
from tightkv.server.logprobs import CompletionLogprobs, joined, prompt_logprobs
from tightkv.server.protocol import CompletionRequest
from tightkv.server.serving import Serving
from tightkv.server.structured import structured_outputs

__all__ = ["create_completion"]

_OBJECT = "text_completion"


async def create_completion(serving: Serving, body: CompletionRequest, http: Request) -> Response:
    """Answer one or several prompts, whole or as a stream.

    Raises:
        RequestError, QueueFullError, EngineError: before anything has been sent.
    """
    serving.check_model(body.model)
    serving.check_logprobs("logprobs", body.logprobs)
    serving.check_logprobs("prompt_logprobs", body.prompt_logprobs)
    prompts = await _prompts(serving, body)
    params = _params(serving, body)
    for prompt in prompts:
        serving.check_room(prompt, body.max_tokens)
    return await _Answer(serving, body, prompts, params, http).response()


async def _prompts(serving: Serving, body: CompletionRequest) -> list[Prompt]:
    given: Any = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    serving.check_num_prompts(len(given) * (body.n or 1))
    special = body.add_special_tokens is not False
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            serving.check_length(prompt)
            prompts.append(await serving.tokenize(prompt, special))
        else:
            prompts.append(Prompt(prompt))
    return prompts


def _params(serving: Serving, body: CompletionRequest) -> SamplingParams:
    wants_prompt = body.echo and body.logprobs is not None
    return body.sampling_params(
        serving.sampling_defaults,
        # The engine makes at least one token; with max_tokens 0 it is not shown.
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=(
            max(body.logprobs or 0, body.prompt_logprobs or 0)
            if wants_prompt
            else body.prompt_logprobs
        ),
        structured_outputs=structured_outputs(body),
    )


class _Answer(Answer):
    def __init__(
        self,
        serving: Serving,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        http: Request,
    ) -> None:
        super().__init__(serving, body, prompts, params, http, "cmpl")
        self._body = body
        self._logprobs = [
            CompletionLogprobs(body.logprobs or 0, bool(body.return_tokens_as_token_ids))
            for _ in range(len(prompts) * params.n)
        ]
        self._begun: set[int] = set()

    @property
    def _chunk_object(self) -> str:
        return _OBJECT

    async def _whole(self) -> dict[str, Any]:
        choices: list[Piece] = [
            {"index": index, "text": "", "logprobs": None, "finish_reason": None}
            for index in range(len(self._logprobs))
        ]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                choice = choices[piece["index"]]
                choice |= piece | {"text": choice["text"] + piece["text"]}
        for index, choice in enumerate(choices):
            if self._body.logprobs is not None:
                choice["logprobs"] = self._logprobs[index].all
            if self._body.prompt_logprobs is not None:
                of_prompt = self._prompt_logprobs[index // self._params.n]
                choice["prompt_logprobs"] = prompt_logprobs(of_prompt)
        usage = self._usage.as_json(hides_completion=self._body.max_tokens == 0)
        return {**self._head, "object": _OBJECT, "choices": choices, "usage": usage}

    async def _pieces(self) -> AsyncGenerator[Piece]:
        async with aclosing(self._completions()) as completions:
            async for which, completion in completions:
                yield await self._piece(which, completion)

    async def _piece(self, which: int, completion: CompletionDelta) -> dict[str, Any]:
        index = which * self._params.n + completion.index
        logprobs, text = [], ""
        if index not in self._begun:
            self._begun.add(index)
            if self._body.echo:
                text = await self._prompt_text(which)
                logprobs += await self._echoed_logprobs(which, index)
        if self._body.max_tokens != 0:
            text += completion.text
            if completion.logprobs is not None:
                logprobs.append(self._logprobs[index].take(completion.logprobs))
        return {
            "index": index,
            "text": text,
            "logprobs": joined(logprobs) if logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }

    async def _prompt_text(self, which: int) -> str:
        prompt = self._prompts[which]
        if prompt.text is not None:
            return prompt.text
        return await self._serving.detokenize(prompt.token_ids)

    async def _echoed_logprobs(self, which: int, index: int) -> list[dict[str, Any]]:
        if self._body.logprobs is None:
            return []
        rest = [position for position in self._prompt_logprobs[which] if position is not None]
        first_id = self._prompts[which].token_ids[0]
        text = await self._serving.detokenize([first_id])
        logprobs = self._logprobs[index]
        return [logprobs.first_of_prompt(first_id, text), logprobs.take(rest)]
