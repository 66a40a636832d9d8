"""The routes, as HTTP clients see them; answers are compared with those of `LLM`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from live_server import PATIENCE, LiveServer, live_server, wait_until
from tightkv import LLM, SamplingParams
from tightkv.engine.llm_engine import LLMEngine
from tightkv.engine.outputs import RequestOutput
from tightkv.engine.sequence import Sequence
from tiny_engine import loaded
from tiny_models import VOCAB_SIZE, save_tiny_model

PROMPT = "The quick brown fox jumps over the lazy dog"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
ENDLESS = {"min_tokens": 1, "stop_token_ids": list(range(VOCAB_SIZE))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with live_server(folder, kv_cache_dtype="int8_per_token_head") as live:
        yield live
        live.wait_until_idle()


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def direct(folder: Path, prompt: Any, **params: Any) -> RequestOutput:
    """What the engine gives without a server."""
    llm = LLM(loaded(folder), kv_cache_memory_bytes=4 << 20, kv_cache_dtype="int8_per_token_head")
    return llm.generate([prompt], SamplingParams(**params))[0]


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    """Objects of a stream, which must end with `[DONE]`."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_completion_equals_that_of_the_engine(client: httpx.Client, folder: Path) -> None:
    answer = post(client, "/v1/completions", model="tiny", prompt=PROMPT, **GREEDY)
    expected = direct(folder, PROMPT, **GREEDY).outputs[0]
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == expected.text
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(PROMPT)
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == len(PROMPT) + 12


@pytest.mark.parametrize(
    "prompt",
    [
        [PROMPT, "other"],
        list(PROMPT.encode()),
        [list(b"ab"), list(b"cde")],
    ],
    ids=["texts", "ids", "lists of ids"],
)
def test_all_kinds_of_prompts(client: httpx.Client, folder: Path, prompt: Any) -> None:
    answer = post(client, "/v1/completions", prompt=prompt, **GREEDY)
    several = prompt if not isinstance(prompt[0], int) else [prompt]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(several)))
    for choice, each in zip(answer["choices"], several, strict=True):
        assert choice["text"] == direct(folder, each, **GREEDY).outputs[0].text


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "abc"]], ids=["one", "two"])
def test_stream_adds_up_to_the_whole(client: httpx.Client, prompt: Any) -> None:
    body = {"prompt": prompt, "n": 2, "seed": 5, "max_tokens": 20, "logprobs": 2, "echo": True}
    whole = post(client, "/v1/completions", **body)
    chunks = events(client, "/v1/completions", **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    for choice in whole["choices"]:
        pieces = [
            piece
            for chunk in chunks
            for piece in chunk["choices"]
            if piece["index"] == choice["index"]
        ]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces][-1] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [
                entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"][name]
            ]
            assert joined == choice["logprobs"][name]


def test_echo_with_logprobs(client: httpx.Client, folder: Path) -> None:
    answer = post(
        client,
        "/v1/completions",
        prompt=PROMPT,
        echo=True,
        logprobs=1,
        **{**GREEDY, "max_tokens": 1},
    )
    logprobs = answer["choices"][0]["logprobs"]
    expected = direct(folder, PROMPT, **{**GREEDY, "max_tokens": 1}, logprobs=1, prompt_logprobs=1)
    assert expected.prompt_logprobs is not None
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for index, position in enumerate(expected.prompt_logprobs[1:], 1):
        assert position is not None
        chosen = next(iter(position.values()))
        assert logprobs["token_logprobs"][index] == pytest.approx(chosen.logprob, abs=1e-6)
        best = min(position.values(), key=lambda each: each.rank)
        shown = logprobs["top_logprobs"][index]
        assert max(shown, key=shown.get) == best.decoded_token
    assert len(logprobs["tokens"]) == len(PROMPT) + 1
    assert answer["choices"][0]["text"].startswith(PROMPT)
    assert logprobs["text_offset"][: len(PROMPT)] == list(range(len(PROMPT)))


def test_echo_alone(client: httpx.Client) -> None:
    answer = post(client, "/v1/completions", prompt=PROMPT, echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT)


def test_tokens_as_token_ids(client: httpx.Client) -> None:
    answer = post(
        client,
        "/v1/completions",
        prompt="ab",
        logprobs=3,
        return_tokens_as_token_ids=True,
        **GREEDY,
    )
    logprobs = answer["choices"][0]["logprobs"]
    assert all(token.startswith("token_id:") for token in logprobs["tokens"])
    assert all(len(top) >= 3 for top in logprobs["top_logprobs"])


def test_prompt_logprobs(client: httpx.Client) -> None:
    answer = post(client, "/v1/completions", prompt="abc", prompt_logprobs=2, **GREEDY)
    positions = answer["choices"][0]["prompt_logprobs"]
    assert positions[0] is None
    assert all(
        {"logprob", "rank", "decoded_token"} == set(e) for p in positions[1:] for e in p.values()
    )


def test_chat_equals_that_of_the_engine(client: httpx.Client, folder: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = post(client, "/v1/chat/completions", messages=messages, **GREEDY)
    expected = direct(folder, "user: hello\nassistant: ", **GREEDY).outputs[0].text
    message = answer["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", expected)
    chunks = events(client, "/v1/chat/completions", messages=messages, **GREEDY)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    pieces = [c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]]
    assert "".join(pieces) == expected


def test_echo_of_a_chat(client: httpx.Client) -> None:
    messages = [*USER, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "echo": True, "continue_final_message": True, **GREEDY}
    whole = post(client, CHAT, **body)["choices"][0]["message"]["content"]
    chunks = events(client, CHAT, **body)
    assert whole.startswith("It is")
    assert "".join(c["delta"].get("content", "") for e in chunks for c in e["choices"]) == whole


def test_chat_logprobs(client: httpx.Client) -> None:
    answer = post(
        client,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        logprobs=True,
        top_logprobs=3,
        **GREEDY,
    )
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        # Greedy: the chosen token is the most probable one.
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]


def test_cached_tokens_and_salts(client: httpx.Client) -> None:
    def cached(**extra: Any) -> int:
        answer = post(client, "/v1/completions", prompt="x" * 64, **GREEDY, **extra)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() == 48
    assert cached(cache_salt="tenant a") == 0
    assert cached(cache_salt="tenant a") == 48
    assert cached(cache_salt="tenant b") == 0
    assert client.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0


def test_priority_reaches_the_scheduler(folder: Path) -> None:
    seen: list[int] = []

    def watch(engine: LLMEngine) -> None:
        add = engine.scheduler.add

        def noting(sequence: Sequence, priority: int = 0) -> None:
            seen.append(priority)
            add(sequence, priority)

        engine.scheduler.add = noting  # type: ignore[method-assign]

    with live_server(folder, scheduling_policy="priority") as server, server.client() as client:
        server.call(watch)
        post(client, COMPLETION, prompt="a", max_tokens=2, priority=-3)
        post(client, CHAT, messages=USER, max_tokens=2, priority=4)
        post(client, CHAT, messages=USER, max_tokens=2)
    assert seen == [-3, 4, 0]


def test_tokenize_and_back(client: httpx.Client) -> None:
    tokens = post(client, "/tokenize", prompt="héllo", return_token_strs=True)
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == 6
    assert tokens["max_model_len"] == 512
    assert post(client, "/detokenize", tokens=tokens["tokens"]) == {"prompt": "héllo"}
    chat = post(client, "/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert post(client, "/detokenize", tokens=chat["tokens"]) == {"prompt": "user: hi\nassistant: "}


def test_models(client: httpx.Client, folder: Path) -> None:
    models = client.get("/v1/models").json()
    card = models["data"][0]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", str(folder), 512)
    assert client.get("/v1/models/tiny").json() == card
    assert client.get("/v1/models/other").status_code == 404


def test_slashes_health_version_page(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    assert set(client.get("/version").json()) == {"version"}
    assert client.get(f"{client.base_url}/v1///models").status_code == 200
    assert "<html" in client.get("/").text
    assert client.get("/state").json()["server"]["model"] == "tiny"


def test_metrics_count_requests(server: LiveServer, client: httpx.Client) -> None:
    def value(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    before = value("vllm:time_to_first_token_seconds_count")
    tokens = value("vllm:generation_tokens_total")
    post(client, "/v1/completions", prompt="abc", **GREEDY)
    server.wait_until_idle()
    wait_until(lambda: value("vllm:generation_tokens_total") == tokens + 12)
    assert value("vllm:time_to_first_token_seconds_count") == before + 1
    assert value("vllm:cache_config_info") == 1
    rejected = value("tightkv:requests_rejected_total")
    assert client.post("/v1/completions", json={"prompt": "a", "n": 0}).status_code == 400
    assert value("tightkv:requests_rejected_total") == rejected + 1


def test_request_ids(client: httpx.Client) -> None:
    assert (
        client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"]
        == "mine-1"
    )
    answer = client.get("/health", headers={"X-Request-Id": "x" * 500})
    assert answer.headers["x-request-id"] != "x" * 500


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (COMPLETION, {}, 400, "prompt"),
        (COMPLETION, {"prompt": []}, 400, "at least one prompt"),
        (COMPLETION, {"prompt": ""}, 400, "no tokens"),
        (COMPLETION, {"prompt": [[]]}, 400, "no tokens"),
        (COMPLETION, {"prompt": [VOCAB_SIZE]}, 400, "ids go from 0"),
        (COMPLETION, {"prompt": [-1]}, 400, "ids go from 0"),
        (COMPLETION, {"prompt": "a", "model": "gpt-9"}, 404, "There is no model"),
        (COMPLETION, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        (COMPLETION, {"prompt": "a", "max_tokens": 0}, 400, "echo"),
        (COMPLETION, {"prompt": "a", "max_tokens": 10**9}, 400, "both together"),
        (COMPLETION, {"prompt": "a" * 600, "max_tokens": None}, 400, "512"),
        (COMPLETION, {"prompt": "a" * 10_000}, 400, "10000 characters"),
        (COMPLETION, {"prompt": ["a"] * 2000}, 400, "is 2000"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 10_000}]}, 400, "characters"),
        (COMPLETION, {"prompt": "a", "temperature": -1}, 400, "temperature"),
        (COMPLETION, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        (COMPLETION, {"prompt": "a", "temperature": 1e300}, 400, "at most 1e+06"),
        (COMPLETION, {"prompt": "a", "repetition_penalty": 1e-300}, 400, "at least 0.001"),
        (COMPLETION, {"prompt": [97], **ENDLESS}, 400, "rules out every token"),
        (COMPLETION, {"prompt": "a", "n": 10**6}, 400, "n:"),
        (COMPLETION, {"prompt": "a", "logprobs": 1000}, 400, "--max-logprobs"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"999999": 1}}, 400, "logit_bias"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        (COMPLETION, {"prompt": "a", "stop": [""]}, 400, "stop"),
        (COMPLETION, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        (COMPLETION, {"prompt": "a", "best_of": 3}, 400, "best_of"),
        (COMPLETION, {"prompt": "a", "temprature": 1}, 400, "Unknown field temprature"),
        (COMPLETION, {"prompt": "a", "stream_options": {}}, 400, "stream"),
        (COMPLETION, {"prompt": "a", "seed": 2**70}, 400, "seed"),
        (COMPLETION, {"prompt": "a", "priority": 1}, 400, "--scheduling-policy priority"),
        (CHAT, {"messages": USER, "priority": "high"}, 400, "priority"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"content": "no role"}]}, 400, "role"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "logprobs"),
        (
            CHAT,
            {"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
            400,
            "contradict",
        ),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, 400, "render"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"tokenize": True}}, 400, "tokenize"),
        (COMPLETION, {"prompt": [None] * 20_000}, 400, "prompt"),
        (COMPLETION, {"prompt": "a", "stop": ["x"] * 65}, 400, "stop"),
        (COMPLETION, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, 400, "streamed"),
        (COMPLETION, {"prompt": ["a"] * 100, "n": 100}, 400, "times n"),
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/detokenize", {"tokens": [10**6]}, 400, "ids go from 0"),
        ("/v1/embeddings", {}, 404, "There is no /v1/embeddings"),
    ],
)
def test_bad_requests(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"prompt": "\xff\xfe"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b'{"prompt": "a", "temperature": 1e999}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413),
        (b"", 400),
    ],
    ids=["cut", "list", "null", "utf-8", "surrogate", "nan", "infinity", "deep", "long", "empty"],
)
@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/tokenize"])
def test_malformed_bodies(client: httpx.Client, content: bytes, status: int, path: str) -> None:
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_body_without_its_type(client: httpx.Client) -> None:
    answer = client.post(COMPLETION, content=b'{"prompt": "a"}')
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_long_body_without_its_length(client: httpx.Client) -> None:
    answer = client.post(COMPLETION, content=(b" " * 65536 for _ in range(200)))
    assert answer.status_code == 413


def test_a_refused_body_still_on_its_way_costs_nobody_the_answer(server: LiveServer) -> None:
    """A connection that is closed meanwhile is reset, and the client may not see why."""
    num_bytes = 20_000_000
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
    connection.putrequest("POST", COMPLETION)
    connection.putheader("Content-Length", str(num_bytes))
    connection.endheaders()
    connection.send(b" " * 1000)
    refused = connection.getresponse()
    assert refused.status == 413
    assert b"--max-request-bytes" in refused.read()
    connection.auto_open = 0
    connection.send(b" " * (num_bytes - 1000))
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def test_wrong_method(client: httpx.Client) -> None:
    answer = client.get(COMPLETION)
    assert answer.status_code == 405
    assert "does not answer GET" in answer.json()["error"]["message"]


def test_one_broken_request_leaves_the_others_alone(
    server: LiveServer, client: httpx.Client, folder: Path
) -> None:
    expected = direct(folder, PROMPT, **GREEDY).outputs[0].text
    for body in ({"prompt": [10**9]}, {"prompt": "a", "logit_bias": {"-5": 3}}):
        assert client.post(COMPLETION, json=body).status_code == 400
    assert post(client, COMPLETION, prompt=PROMPT, **GREEDY)["choices"][0]["text"] == expected
    server.wait_until_idle()
