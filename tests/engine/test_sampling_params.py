from __future__ import annotations

import math
from typing import Any

import pytest

from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import InvalidSamplingParamsError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", 1.1e6),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1001),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("seed", 2**64),
        ("seed", 0.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101.0}),
        ("forced_token_ids", []),
    ],
)
def test_value_outside_its_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 3),
        ("temperature", 0),
        ("temperature", 1e6),
        ("repetition_penalty", 0.001),
        ("repetition_penalty", 1000),
        ("top_p", 1e-6),
        ("top_k", -1),
        ("min_p", 1),
        ("presence_penalty", -2.0),
        ("seed", -1),
        ("seed", 2**64 - 1),
        ("max_tokens", None),
        ("logprobs", -1),
        ("logprobs", 0),
        ("logit_bias", {1: -100.0}),
    ],
)
def test_value_at_its_limit_is_taken(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"n": 2, "temperature": 0.0}, "n must be 1 when using greedy sampling, got 2"),
        ({"min_tokens": 17}, "raise max_tokens"),
        ({"stop": "x", "detokenize": False}, "detokenize"),
        ({"forced_token_ids": [1], "n": 2}, "remove"),
        ({"forced_token_ids": [1], "stop": "x"}, "remove"),
        ({"forced_token_ids": [1], "stop_token_ids": [2]}, "remove"),
        ({"forced_token_ids": [1] * 17}, "max_tokens to None"),
    ],
)
def test_contradiction_is_refused_with_advice(options: dict[str, Any], advice: str) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=advice):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(None, ()), ([], ()), ("end", ("end",)), (["a", "bc"], ("a", "bc"))],
)
def test_stop_strings(stop: Any, expected: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == expected


def test_greedy_begins_below_1e_5() -> None:
    assert SamplingParams(temperature=0.99e-5).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("logit_bias", {0: 1.0, 9: 1.0}, {10: 1.0}),
        ("stop_token_ids", [0, 9], [9, -1]),
        ("forced_token_ids", [0, 9], [0, 10]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(name: str, good: Any, bad: Any) -> None:
    SamplingParams(**{name: good}).check_against_vocabulary(10)
    with pytest.raises(InvalidSamplingParamsError, match=f"{name} holds token id"):
        SamplingParams(**{name: bad}).check_against_vocabulary(10)


def test_a_minimum_that_no_token_can_reach_is_refused() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=range(9))
    params.check_against_vocabulary(10)
    with pytest.raises(InvalidSamplingParamsError, match="min_tokens=1 rules out every token"):
        params.check_against_vocabulary(10, eos_token_ids={9})
    SamplingParams(stop_token_ids=range(10)).check_against_vocabulary(10)
    SamplingParams(min_tokens=1, stop_token_ids=range(9), ignore_eos=True).check_against_vocabulary(
        10, eos_token_ids={9}
    )
