from __future__ import annotations

import json

import pytest
from benchmarks.serving.stream_times import Answer, percentile, read_answer, summarize

from tightkv.benchmark.http_client import Chunk
from tightkv.benchmark.stream import StreamError


def _chunk(time: float, text: str, finish_reason: str | None = None) -> Chunk:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return time, f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def _usage(time: float, prompt_tokens: int, completion_tokens: int) -> Chunk:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return time, f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()


def _done(time: float) -> Chunk:
    return time, b"data: [DONE]\n\n"


def test_times_of_an_answer_begin_with_its_request() -> None:
    chunks = [
        _chunk(10.5, ""),
        _chunk(11.0, "a"),
        _chunk(12.0, "bc"),
        _chunk(13.0, "d", "length"),
        _usage(13.0, 7, 5),
        _done(13.0),
    ]
    answer = read_answer(10.0, chunks, max_tokens=5)
    assert answer == Answer(ttft=1.0, seconds=3.0, new_tokens=5, prompt_tokens=7)
    assert answer.tpot == 0.5


def test_without_usage_the_reason_to_stop_tells_how_many_tokens_came() -> None:
    some = [_chunk(1.0, "a"), _chunk(2.0, "b")]
    whole = read_answer(0.0, [*some, _chunk(3.0, "", "length"), _done(3.0)], max_tokens=4)
    assert (whole.new_tokens, whole.prompt_tokens) == (4, None)
    ended = read_answer(0.0, [*some, _chunk(3.0, "", "stop"), _done(3.0)], max_tokens=4)
    assert ended.new_tokens == 2


def test_an_answer_without_text_lasts_until_its_end() -> None:
    chunks = [_chunk(1.0, "", "length"), _usage(1.5, 3, 1), _done(2.0)]
    answer = read_answer(0.0, chunks, max_tokens=1)
    assert answer == Answer(ttft=2.0, seconds=2.0, new_tokens=1, prompt_tokens=3)
    assert answer.tpot is None


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([_chunk(1.0, "a")], "without"),
        ([_chunk(1.0, "a"), _done(2.0)], "finish_reason"),
        ([(1.0, b'data: {"error": {"message": "no"}}\n\n'), _done(2.0)], "'no'"),
        ([(1.0, b"data: {\n\n"), _done(2.0)], "no JSON"),
    ],
)
def test_what_is_not_whole_is_a_failure(chunks: list[Chunk], said: str) -> None:
    with pytest.raises(StreamError, match=said):
        read_answer(0.0, chunks, max_tokens=2)


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([5.0], 99) == 5.0
    assert percentile([], 50) is None


def test_figures_of_a_load() -> None:
    answers = [Answer(1.0, 3.0, 5, 10), Answer(2.0, 2.0, 1, 20), Answer(3.0, 6.0, 4, 30)]
    figures = summarize(answers, seconds=10.0)
    assert figures["requests_per_second"] == pytest.approx(0.3)
    assert figures["output_tokens_per_second"] == pytest.approx(1.0)
    assert figures["ttft_p50"] == 2.0
    assert figures["tpot_p50"] == pytest.approx(0.75)  # of 0.5 and 1.0: one token has none
    assert figures["latency_p50"] == 3.0
    assert figures["latency_per_token_p50"] == pytest.approx(1.5)
    assert (figures["new_tokens"], figures["prompt_tokens"]) == (10, 60)
