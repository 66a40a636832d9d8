"""Requests from random tokens, conversations, files of one's own, and traces."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tightkv.benchmark.data import (
    BenchRequest,
    DatasetConfig,
    Vocabulary,
    length_factor,
    make_requests,
)
from tightkv.benchmark.traces import TracedRequest, read_azure, read_mooncake, scaled
from tightkv.errors import ConfigError, RequestError
from tiny_models import BOS, EOS, tiny_tokenizer

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1000, "output_length": 50, "hash_ids": [7, 8]},
    {"timestamp": 2500, "input_length": 1300, "output_length": 10, "hash_ids": [7, 9, 10]},
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.of(tiny_tokenizer())


def made(vocabulary: Vocabulary, path: Path | None = None, **settings: Any) -> list[BenchRequest]:
    return make_requests(DatasetConfig(path=path, **settings), vocabulary)


def written(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_random_tokens(vocabulary: Vocabulary) -> None:
    requests = made(vocabulary, num_prompts=50, input_len=20, output_len=8, prefix_len=4)
    assert all((len(each.token_ids), each.output_len) == (24, 8) for each in requests)
    assert len({each.token_ids[:4] for each in requests}) == 1
    assert len({each.token_ids[4:] for each in requests}) == 50
    assert not {BOS, EOS} & {token for each in requests for token in each.token_ids}
    again = made(vocabulary, num_prompts=50, input_len=20, output_len=8, prefix_len=4)
    assert again == requests
    assert made(vocabulary, num_prompts=1, input_len=20, seed=1)[0] not in requests


def test_random_lengths_differ_by_the_ratio(vocabulary: Vocabulary) -> None:
    requests = made(vocabulary, num_prompts=300, input_len=20, output_len=10, range_ratio=0.5)
    assert {len(each.token_ids) for each in requests} == set(range(10, 31))
    assert {each.output_len for each in requests} == set(range(5, 16))


def test_a_text_has_as_many_tokens(vocabulary: Vocabulary) -> None:
    """Random bytes are no UTF-8: decoded and encoded again they are other and more tokens."""
    rng = random.Random(0)
    for request in made(vocabulary, num_prompts=20, input_len=30):
        with_text = vocabulary.as_text(request, rng)
        assert len(vocabulary.encode(with_text.text)) == len(with_text.token_ids) == 30


def test_conversations(vocabulary: Vocabulary, tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi!"}]
    chat = [{"role": "system", "content": "x"}, *({"role": "user", "content": "Why"},) * 2]
    entries = [{"conversations": talk}, {"messages": chat}, {"conversations": []}]
    lines = written(tmp_path / "chats.jsonl", *entries)
    array = tmp_path / "chats.json"
    array.write_text(json.dumps(entries))
    for path in (lines, array):
        requests = made(vocabulary, path, name="sharegpt", num_prompts=2)
        assert {(each.text, each.output_len) for each in requests} == {("Hello?", 3), ("Why", 3)}


def test_prompts_of_ones_own(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": "abc", "output_tokens": 5}, "de")
    requests = made(vocabulary, path, name="custom", num_prompts=2)
    assert {(each.text, each.output_len) for each in requests} == {("abc", 5), ("de", 256)}
    requests = made(vocabulary, path, name="custom", num_prompts=2, output_len=9)
    assert {each.output_len for each in requests} == {9}
    requests = made(vocabulary, path, name="custom", num_prompts=1, max_request_len=8)
    assert [each.text for each in requests] == ["abc"]


def test_azure(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    requests = made(vocabulary, path, name="azure", num_prompts=3, max_request_len=467)
    assert [len(each.token_ids) for each in requests] == [187, 198, 439]
    assert [each.output_len for each in requests] == [22, 54, 27]
    config = DatasetConfig(name="azure", path=path, num_prompts=3, max_request_len=467)
    assert length_factor(config) == 0.5
    assert length_factor(replace(config, max_request_len=None)) == 1.0
    arrivals = [each.arrival for each in requests]
    assert arrivals == pytest.approx([0.0, 4.314579, 4.541877], abs=1e-6)


def test_mooncake_shares_beginnings(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", *MOONCAKE)
    first, second = made(vocabulary, path, name="mooncake", num_prompts=2)
    assert (len(first.token_ids), len(second.token_ids)) == (1000, 1300)
    assert first.token_ids[:512] == second.token_ids[:512]
    assert first.token_ids[512:600] != second.token_ids[512:600]
    assert [first.arrival, second.arrival] == [0.0, 1.5]
    # Scaled, they share as large a part.
    first, second = made(vocabulary, path, name="mooncake", num_prompts=2, max_request_len=131)
    assert (len(first.token_ids), len(second.token_ids)) == (100, 130)
    assert first.token_ids[:51] == second.token_ids[:51]
    assert first.token_ids[51:] != second.token_ids[51:100]


def test_lengths_that_fit_stay() -> None:
    trace = [TracedRequest(0.0, 30, 10), TracedRequest(1.0, 1, 2)]
    assert scaled(trace, 40) == trace
    assert all(each.prompt >= 1 and each.answer >= 1 for each in scaled(trace, 2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "burstgpt"}, "choose one of"),
        ({"name": "azure"}, "name the file"),
        ({"path": Path("x")}, "leave it out"),
        ({"num_prompts": 0}, "--num-prompts is 0"),
        ({"input_len": 0}, "--input-len is 0"),
        ({"range_ratio": 1.0}, "--random-range-ratio is 1"),
    ],
)
def test_settings_that_contradict(
    vocabulary: Vocabulary, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_requests(DatasetConfig(**settings), vocabulary)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("azure", AZURE.replace("374", "many"), "no Azure trace"),
        ("azure", "time,tokens\n1,2\n", "needs the columns"),
        ("azure", AZURE, "has 3 requests, and 4"),
        ("mooncake", '{"timestamp": 1}\n', "line 1, is no request"),
        ("mooncake", "[]\n", "line 1, is no request"),
        ("mooncake", "", "has 0 requests"),
        ("sharegpt", "{\n", "line 1, is not JSON"),
        ("sharegpt", '{"text": "a"}\n', 'neither "conversations" nor "messages"'),
        ("sharegpt", '{"messages": ["a"]}\n', "a turn without a text"),
        ("custom", '{"prompt": ""}\n', 'has no "prompt"'),
        ("custom", '{"prompt": "a", "output_tokens": 0}\n', '"output_tokens" 0'),
        ("custom", '"a"\n', "has 1 requests, and 4"),
        ("custom", None, "cannot be read"),
        ("azure", None, "cannot be read"),
    ],
)
def test_files_that_are_refused(
    vocabulary: Vocabulary, tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    path = tmp_path / "data"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RequestError, match=said):
        made(vocabulary, path, name=name, num_prompts=4)


def test_traces_are_read_from_their_beginning(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    assert [(each.prompt, each.answer) for each in read_azure(path, 2)] == [(374, 44), (396, 109)]
    path = written(tmp_path / "trace.jsonl", *MOONCAKE)
    assert read_mooncake(path, 1) == [TracedRequest(0.0, 1000, 50, (7, 8))]
