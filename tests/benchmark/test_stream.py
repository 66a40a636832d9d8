"""When tokens came, read from server-sent events."""

from __future__ import annotations

import json

import pytest

from tightkv.benchmark.http_client import Chunk, Response
from tightkv.benchmark.statistics import RequestTiming
from tightkv.benchmark.stream import events, read_timing


def piece(time: float, text: str, finish_reason: str | None = None) -> Chunk:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return time, f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def delta(time: float, **fields: str) -> Chunk:
    return time, f"data: {json.dumps({'choices': [{'delta': fields}]})}\n\n".encode()


def usage(time: float, **fields: object) -> Chunk:
    return time, f"data: {json.dumps({'choices': [], 'usage': fields})}\n\n".encode()


def done(time: float) -> Chunk:
    return time, b"data: [DONE]\n\n"


def timing(*chunks: Chunk, status: int = 200) -> RequestTiming:
    return read_timing(Response(10.0, status, "", chunks), prompt_tokens=9)


def test_an_event_has_the_time_at_which_it_is_whole() -> None:
    chunks = [(1.0, b"data: a\n\nda"), (2.0, b"ta: b\r\n"), (3.0, b"\r\n: ping\n\ndata: c\n\n")]
    assert events(chunks) == [(1.0, "a"), (2.0, "b"), (3.0, "c")]


def test_each_event_with_a_choice_is_a_token() -> None:
    tokens = [piece(10.5, "a"), piece(11.0, ""), piece(12.0, "b", "length")]
    counts = usage(12.5, prompt_tokens=7, completion_tokens=3)
    found = timing(*tokens, counts, done(13.0))
    assert found == RequestTiming(10.0, (10.5, 11.0, 12.0), prompt_tokens=7, output_tokens=3)
    assert found.is_complete


def test_without_usage_the_client_counts() -> None:
    found = timing(piece(11.0, "a"), piece(12.0, "b", "stop"))
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (9, 2, None)


def test_the_prefix_cache_is_told() -> None:
    counts = usage(12.0, completion_tokens=1, prompt_tokens_details={"cached_tokens": 5})
    assert timing(piece(11.0, "a", "stop"), counts, done(12.0)).cached_tokens == 5


def test_an_event_that_only_names_the_role_is_no_token() -> None:
    first, second = delta(11.0, role="assistant", content=""), delta(12.0, content="a")
    assert timing(first, second, done(13.0)).token_times == (12.0,)
    both = delta(11.0, role="assistant", content="a")
    assert timing(both, second, done(13.0)).token_times == (11.0, 12.0)


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([piece(11.0, "a")], "ended before the answer did"),
        ([done(11.0)], "no token came"),
        ([(11.0, b"data: {not json\n\n")], "no JSON"),
        ([(11.0, b"data: []\n\n")], "no object"),
        ([(11.0, b'data: {"error": {"message": "out\\nof blocks"}}\n\n')], "out of blocks"),
    ],
)
def test_what_is_not_whole(chunks: list[Chunk], said: str) -> None:
    found = timing(*chunks)
    assert said in found.error
    assert not found.is_complete


def test_a_status_is_an_error_with_what_the_server_says() -> None:
    body = json.dumps({"error": {"message": "There is no model 'x'."}}).encode()
    assert timing((11.0, body), status=404).error == "status 404: There is no model 'x'."
    assert timing(status=502).error == "status 502: nothing"
