"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tightkv.engine.outputs import CompletionDelta
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import RequestError
from tightkv.models import check_template_arguments
from tightkv.server.answer import Answer, Piece
from tightkv.server.async_engine import Prompt
from tightkv.server.logprobs import chat_logprobs, prompt_logprobs
from tightkv.server.protocol import ChatCompletionRequest, Message, TokenizeRequest
from tightkv.server.serving import Serving
from tightkv.server.structured import structured_outputs
from tightkv.server.tool_call_reader import Delta
from tightkv.server.tool_calls import ToolCallPlan, plan_tool_calls, with_arguments_as_objects

__all__ = ["chat_prompt", "create_chat_completion"]

_ROLE = "assistant"


async def create_chat_completion(
    serving: Serving, body: ChatCompletionRequest, http: Request
) -> Response:
    """Answer a conversation, whole or as a stream.

    Raises:
        RequestError, QueueFullError, EngineError: before anything has been sent.
    """
    serving.check_model(body.model)
    serving.check_logprobs("top_logprobs", body.top_logprobs)
    serving.check_logprobs("prompt_logprobs", body.prompt_logprobs)
    tools = plan_tool_calls(
        body.tools, body.tool_choice, body.parallel_tool_calls, serving.model.tokenizer
    )
    params = _params(serving, body, tools)
    prompt = await chat_prompt(serving, body, body.messages)
    serving.check_room(prompt, params.max_tokens)
    return await _Answer(serving, body, prompt, params, http, tools).response()


async def chat_prompt(
    serving: Serving,
    body: ChatCompletionRequest | TokenizeRequest,
    messages: Sequence[Message],
) -> Prompt:
    """A conversation in the words of the chat template.

    Raises:
        RequestError: for parts that are no text, and where the template cannot render it.
    """
    goes_on = bool(body.continue_final_message)
    check_template_arguments(body.chat_template_kwargs or {})
    return await serving.render_chat(
        [_flat(message) for message in messages],
        # Templates write the special tokens themselves.
        bool(body.add_special_tokens),
        **{
            **(body.chat_template_kwargs or {}),
            "tools": body.tools or None,
            "add_generation_prompt": not goes_on and body.add_generation_prompt is not False,
            "continue_final_message": goes_on,
        },
    )


def _flat(message: Message) -> dict[str, Any]:
    """A message whose content is one text, as most templates want it."""
    flat = with_arguments_as_objects(message.model_dump(exclude_none=True))
    if isinstance(message.content, list):
        flat["content"] = "".join(_text_of(part) for part in message.content)
    return flat


def _text_of(part: dict[str, Any]) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise RequestError(
            f"A message has a part of type {str(part.get('type'))[:60]!r}: only parts of type "
            "'text' with a text are served."
        )
    return text


class _Answer(Answer):
    def __init__(
        self,
        serving: Serving,
        body: ChatCompletionRequest,
        prompt: Prompt,
        params: SamplingParams,
        http: Request,
        tools: ToolCallPlan,
    ) -> None:
        super().__init__(serving, body, [prompt], params, http, "chatcmpl")
        self._body = body
        self._readers = [tools.new_reader() for _ in range(params.n)]
        self._echoed = _text_of_last(body) if body.echo else ""
        self._begun: set[int] = set()

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk"

    async def _whole(self) -> dict[str, Any]:
        choices: list[Piece] = [
            {"index": index, "message": {"role": _ROLE, "content": ""}, "logprobs": None}
            for index in range(self._params.n)
        ]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                choice = choices[piece["index"]]
                _extend(choice["message"], piece.pop("delta"))
                logprobs = piece.pop("logprobs")
                if logprobs is not None:
                    before = choice["logprobs"] or {"content": []}
                    choice["logprobs"] = {"content": before["content"] + logprobs["content"]}
                choice |= piece
        for choice in choices:
            message = choice["message"]
            if message.get("tool_calls") and not message["content"]:
                message["content"] = None
        answer = {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": self._usage.as_json(),
        }
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs[0])
        return answer

    async def _pieces(self) -> AsyncGenerator[Piece]:
        """The first of each choice tells the role, and what is echoed."""
        async with aclosing(self._completions()) as completions:
            async for _, completion in completions:
                for piece in self._pieces_of(completion):
                    if piece["index"] not in self._begun:
                        self._begun.add(piece["index"])
                        text = self._echoed + piece["delta"].get("content", "")
                        piece["delta"] = {"role": _ROLE, **piece["delta"], "content": text}
                    yield piece

    def _pieces_of(self, completion: CompletionDelta) -> Iterator[Piece]:
        """Usually one piece; several where content and calls come together."""
        reader = self._readers[completion.index]
        deltas = reader.feed(completion.text)
        reason: str | None = completion.finish_reason
        if reason is not None:
            deltas += reader.finish()
            if reader.num_calls and reason == "stop":
                reason = "tool_calls"
        logprobs = None
        if completion.logprobs:
            body = self._body
            logprobs = chat_logprobs(
                completion.logprobs, body.top_logprobs or 0, bool(body.return_tokens_as_token_ids)
            )
        # Tokens without text have a piece too: their log-probabilities, or the end.
        deltas = deltas or ([{}] if reason or logprobs else [])
        for number, delta in enumerate(deltas, 1):
            is_last = number == len(deltas)
            yield {
                "index": completion.index,
                "delta": delta,
                "logprobs": logprobs if number == 1 else None,
                "finish_reason": reason if is_last else None,
                "stop_reason": completion.stop_reason if is_last else None,
            }


def _params(serving: Serving, body: ChatCompletionRequest, tools: ToolCallPlan) -> SamplingParams:
    if tools.needs_special_tokens and body.skip_special_tokens is None:
        body.skip_special_tokens = False
    return body.sampling_params(
        serving.sampling_defaults,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        structured_outputs=tools.structured_outputs(structured_outputs(body)),
    )


def _text_of_last(body: ChatCompletionRequest) -> str:
    """Content of the last message, where that is the assistant's, which the answer goes on."""
    last = body.messages[-1]
    return str(_flat(last).get("content") or "") if last.role == _ROLE else ""


def _extend(message: dict[str, Any], delta: Delta) -> None:
    """Put a piece of an answer to what is there."""
    if delta.get("content"):
        message["content"] += delta["content"]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({name: value for name, value in call.items() if name != "index"})
        else:
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
