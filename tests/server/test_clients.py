"""The official client and the evaluation harness, as their users run them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from live_server import PATIENCE, LiveServer, live_server
from tiny_models import save_tiny_model

MESSAGES: Any = [{"role": "user", "content": "hello"}]
GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "llama")
    with live_server(folder, {"api_key": ("key",)}, kv_cache_dtype="int8") as live:
        yield live
        live.wait_until_idle()


def options(server: LiveServer) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "key", "timeout": PATIENCE, "max_retries": 0}


def test_sync_client(server: LiveServer) -> None:
    with openai.OpenAI(**options(server)) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
        text = answer.choices[0].message.content
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 12
        assert answer.usage.prompt_tokens_details is not None
        stream = client.chat.completions.create(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        chunks = list(stream)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
        completion = client.completions.create(prompt=["a", "b"], logprobs=2, **GREEDY)
        assert len(completion.choices) == 2
        assert completion.choices[1].logprobs is not None


def test_tool_calls_come_in_pieces(server: LiveServer) -> None:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    parameters: Any = {
        "type": "object",
        "properties": {"first": digit, "second": digit},
        "required": ["first", "second"],
        "additionalProperties": False,
    }
    asked: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": parameters}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 300,
    }
    with openai.OpenAI(**options(server)) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            events = list(stream)
            streamed = stream.get_final_completion().choices[0]
    (call,) = whole.message.tool_calls or []
    (same,) = streamed.message.tool_calls or []
    assert call.type == same.type == "function"
    assert same.function.name == call.function.name == "add"
    assert same.function.arguments == call.function.arguments
    assert set(json.loads(call.function.arguments)) == {"first", "second"}
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    pieces = [
        event.arguments_delta
        for event in events
        if event.type == "tool_calls.function.arguments.delta"
    ]
    assert len(pieces) > 10
    assert "".join(pieces) == call.function.arguments
    chunks = [event.chunk.choices[0].delta for event in events if event.type == "chunk"]
    (first, *rest) = [call for delta in chunks for call in delta.tool_calls or ()]
    assert (first.index, first.type) == (0, "function")
    assert first.id
    assert first.function is not None
    assert (first.function.name, first.function.arguments) == ("add", "")
    assert {(each.index, each.id) for each in rest} == {(0, None)}


def test_async_client(server: LiveServer) -> None:
    async def run() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(**options(server)) as client:
            many = await asyncio.gather(
                *(client.completions.create(prompt=f"prompt {i}", **GREEDY) for i in range(8))
            )
            text = ""
            stream = await client.completions.create(prompt="prompt 3", stream=True, **GREEDY)
            async for chunk in stream:
                text += chunk.choices[0].text
            return [answer.choices[0].text for answer in many], text

    texts, streamed = asyncio.run(run())
    assert streamed == texts[3]


def test_errors_are_the_clients_own(server: LiveServer) -> None:
    with openai.OpenAI(**options(server)) as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="tiny", prompt="a", max_tokens=-1)
    with (
        openai.OpenAI(**options(server) | {"api_key": "wrong"}) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
