"""Texts that must have a form: they have it, they end, and nobody else notices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from real_model import smollm2
from tightkv import LLM, SamplingParams
from tightkv.engine.grammar import GrammarCompiler
from tightkv.engine.request import Request
from tightkv.engine.sampler import SampledToken, Sampler, SamplingState, UnusableLogits
from tightkv.engine.sampling_params import StructuredOutputs
from tightkv.errors import InvalidSamplingParamsError, RequestError
from tiny_engine import GREEDY, logits_by_position, prompts, tiny_llm, token_ids
from tiny_models import BOS, EOS, VOCAB_SIZE, save_tiny_model, tiny_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[StructuredOutputs, Callable[[str], bool]]] = {
    "json": (StructuredOutputs(json=PERSON), lambda text: validates(json.loads(text), PERSON)),
    "json text": (
        StructuredOutputs(json=json.dumps(PERSON)),
        lambda text: validates(json.loads(text), PERSON),
    ),
    "regex": (
        StructuredOutputs(regex="[a-f]{3}-(x|yy)[0-9]{0,4}"),
        lambda text: bool(re.fullmatch("[a-f]{3}-(x|yy)[0-9]{0,4}", text)),
    ),
    "choice": (
        StructuredOutputs(choice=["red", 'gr"een\n', "\N{GRINNING FACE}é"]),
        lambda text: text in ("red", 'gr"een\n', "\N{GRINNING FACE}é"),
    ),
    "grammar": (
        StructuredOutputs(grammar='start: item ("," item){1,3}\nitem: "a" | "(" item ")" | "b"'),
        lambda text: text.count(",") in (1, 2, 3) and text.count("(") == text.count(")"),
    ),
}


def validates(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value follows a schema of the family that `schemas` draws from."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "integer":
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return is_int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(validates(item, schema["items"]) for item in value)
        )
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(known)
            and all(validates(value[key], known[key]) for key in value)
        )
    return value is None if kind == "null" else isinstance(value, bool)


def _integers(bounds: tuple[int, int]) -> dict[str, Any]:
    return {"type": "integer", "minimum": min(bounds), "maximum": max(bounds)}


def _arrays(items: dict[str, Any], sizes: tuple[int, int]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": min(sizes), "maxItems": max(sizes)}


def _objects(properties: dict[str, Any], required: set[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(required & set(properties)),
        "additionalProperties": False,
    }


KEYS = st.sampled_from(["a", "key", 'say "hi"', "ü"])
LEAVES = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}]),
    st.builds(_integers, st.tuples(st.integers(-200, 200), st.integers(-200, 200))),
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 6)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.integers(-9, 9), st.text(max_size=4)), min_size=1, max_size=3),
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_arrays, inner, st.tuples(st.integers(0, 2), st.integers(0, 2))),
        st.builds(_objects, st.dictionaries(KEYS, inner, max_size=3), st.sets(KEYS)),
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return tiny_llm(folder)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE, {EOS})


def structured(form: StructuredOutputs, **options: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=form, **{"max_tokens": None, **options})


def regex(expression: str, **options: Any) -> SamplingParams:
    return structured(StructuredOutputs(regex=expression), **options)


def text_of(llm: LLM, params: SamplingParams) -> str:
    """The text of one answer, which must have come to its end."""
    output = llm.generate(prompts(1), params)[0]
    assert output.error is None
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
    return output.outputs[0].text


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_p": 0.5, "top_k": 3}], ids=str)
def test_the_text_has_the_form(llm: LLM, name: str, options: dict[str, Any]) -> None:
    form, follows = FORMS[name]
    seeds = range(1 if options.get("temperature") == 0 else 5)
    texts = {text_of(llm, structured(form, seed=seed, **options)) for seed in seeds}
    assert all(follows(text) for text in texts), texts


def test_any_json_object(llm: LLM) -> None:
    params = structured(StructuredOutputs(json_object=True), logit_bias={_id("}"): 20})
    assert isinstance(json.loads(text_of(llm, params)), dict)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_what_is_finished_follows_its_schema(llm: LLM, schema: dict[str, Any], seed: int) -> None:
    params = structured(StructuredOutputs(json=schema), seed=seed)
    completion = llm.generate(prompts(1), params)[0].outputs[0]
    assert completion.finish_reason in ("stop", "length")
    if completion.finish_reason == "stop":
        assert validates(json.loads(completion.text), schema), completion.text


def test_completions_of_one_prompt_have_their_own_state(llm: LLM) -> None:
    output = llm.generate(prompts(1), regex("[a-z]{5,9}!", n=4, seed=3))[0]
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-z]{5,9}!", text) for text in texts)
    assert len(set(texts)) == 4


def test_other_requests_of_the_batch_are_as_alone(folder: Path) -> None:
    params = [GREEDY, regex("[0-9]{12}", temperature=0), GREEDY, regex("(ab|cd){6}", seed=1)]
    together = tiny_llm(folder).generate(prompts(), params)
    alone = tiny_llm(folder, max_num_seqs=1)
    for prompt, param, output in zip(prompts(), params, together, strict=True):
        assert alone.generate([prompt], param)[0].outputs == output.outputs


def test_preemption_leaves_the_state_alone(folder: Path) -> None:
    params = [regex("([a-z]{3}-){8}", seed=index) for index in range(4)]
    tight = tiny_llm(folder, pool_tokens=112)
    tight.engine.scheduler.num_reserved_tokens = 0  # so that some are preempted
    outputs = [output.outputs[0].text for output in tight.generate(prompts(), params)]
    assert tight.engine.stats.num_preemptions > 0
    roomy = tiny_llm(folder).generate(prompts(), params)
    assert outputs == [output.outputs[0].text for output in roomy]
    assert all(re.fullmatch("([a-z]{3}-){8}", text) for text in outputs)


class TestEnds:
    """The form alone says where a text ends."""

    @pytest.mark.parametrize(
        "options",
        [
            {"ignore_eos": True},
            {"min_tokens": 50},
            {"stop": ["c", "d-"]},
            {"stop_token_ids": list(range(256))},
            {"stop": "x", "ignore_eos": True, "min_tokens": 50, "presence_penalty": 2.0},
        ],
        ids=str,
    )
    def test_nothing_else_ends_or_prolongs_it(self, llm: LLM, options: dict[str, Any]) -> None:
        assert re.fullmatch("(abc|d-x){4}", text_of(llm, regex("(abc|d-x){4}", **options)))

    def test_at_once_where_nothing_may_follow(self, llm: LLM) -> None:
        completion = llm.generate(prompts(1), regex("abc", logprobs=0))[0].outputs[0]
        assert completion.text == "abc"
        assert len(completion.token_ids) == 3
        assert completion.logprobs is not None
        assert len(completion.logprobs) == 3

    def test_at_an_end_of_sequence_where_more_may_follow(self, llm: LLM) -> None:
        for ignore_eos in (False, True):
            params = regex("a*", logit_bias={EOS: 100}, ignore_eos=ignore_eos)
            assert llm.generate(prompts(1), params)[0].outputs[0].token_ids == (EOS,)

    def test_not_before_min_tokens_while_more_may_follow(self, llm: LLM) -> None:
        assert text_of(llm, regex("a{0,9}", logit_bias={EOS: 100}, min_tokens=5)) == "aaaaa"
        assert text_of(llm, regex("a{0,3}", logit_bias={EOS: 100}, min_tokens=5)) == "aaa"

    @pytest.mark.parametrize("form", [{"choice": [""]}, {"regex": ""}, {"grammar": 'start: ""'}])
    def test_an_empty_text(self, llm: LLM, form: dict[str, Any]) -> None:
        assert text_of(llm, structured(StructuredOutputs(**form), min_tokens=2)) == ""

    def test_max_tokens_still_cuts(self, llm: LLM) -> None:
        completion = llm.generate(prompts(1), regex("(ab){9}", max_tokens=5))[0].outputs[0]
        assert (completion.text, completion.finish_reason) == ("ababa", "length")
        whole = llm.generate(prompts(1), regex("(ab){3}", max_tokens=6))[0].outputs[0]
        assert whole.finish_reason == "stop"


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    params = regex("[xyz]{4}", temperature=0, logprobs=2)
    rows = logits_by_position(llm, prompts(1)[0], params)
    completion = llm.generate(prompts(1), params)[0].outputs[0]
    assert completion.logprobs is not None
    for position, (token_id, top) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True), len(prompts(1)[0]) - 1
    ):
        own = rows[position].log_softmax(-1)
        assert top[token_id].logprob == pytest.approx(own[token_id].item(), abs=1e-5)
        assert set(top) == {token_id, *own.topk(2).indices.tolist()}


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "strin"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "array", "uniqueItems": True}},
        {"json": {"type": "string", "pattern": "("}},
        {"json": {"not": {}}},
        {"json": {"$ref": "#"}},
        {"json": "no JSON"},
        {"json": "[1]"},
        {"json": {"enum": [object()]}},
        {"regex": "("},
        {"regex": "a(?=b)"},
        {"regex": "\ud800"},
        {"grammar": "start: foo"},
        {"grammar": "nonsense"},
        {"grammar": "start: start"},
        {"grammar": f"start: {'(' * 10_000}"},
        {"choice": ["\udfff"]},
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused(llm: LLM, form: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^structured_outputs cannot be followed \(") as caught:
        llm.engine.add_request("r", prompts(1)[0], structured(StructuredOutputs(**form)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not llm.engine.has_unfinished_requests


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"json_object": False},
        {"regex": "a", "json_object": True},
        {"choice": []},
        {"choice": "abc"},
        {"choice": [1]},
        {"json": True},
        {"json_object": 1},
        {"regex": 5},
        {"grammar": ["a"]},
    ],
    ids=str,
)
def test_a_form_is_exactly_one_of_the_right_type(form: dict[str, Any]) -> None:
    with pytest.raises(InvalidSamplingParamsError):
        StructuredOutputs(**form)


def test_contradictions_of_sampling_parameters() -> None:
    with pytest.raises(InvalidSamplingParamsError, match="forced_token_ids"):
        regex("a", forced_token_ids=[1])
    wrong: Any = {"regex": "a"}
    with pytest.raises(InvalidSamplingParamsError, match="structured_outputs must be"):
        SamplingParams(structured_outputs=wrong)


class TestFailuresInAStep:
    def test_of_the_mask_and_of_a_token_end_their_request_alone(self, llm: LLM) -> None:
        broken, fine = (_added(llm, name, regex("[a-z]{6}", seed=1)) for name in ("b", "f"))
        grammar = broken.sequences[0].sampling.grammar
        assert grammar is not None
        assert not grammar.consume(_id("!"))
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
        error = broken.output().error
        assert error is not None
        assert error.startswith("The grammar of structured_outputs failed (")
        assert "\n" not in error
        assert fine.output().error is None
        assert fine.output().outputs[0].finish_reason == "stop"

    def test_where_the_model_has_no_allowed_token(self, compiler: GrammarCompiler) -> None:
        params = regex("abc")
        states = [_state(compiler, params), _state(compiler, params)]
        logits = torch.zeros(2, VOCAB_SIZE)
        logits[0, _id("a")] = -torch.inf
        unusable, token = Sampler().sample(logits, states)
        assert isinstance(unusable, UnusableLogits)
        assert "structured_outputs" in str(unusable.error)
        assert token == SampledToken(_id("a"))


class TestCompiler:
    def test_ends_are_allowed_exactly_where_the_text_is_complete(self) -> None:
        compiler = GrammarCompiler(tiny_tokenizer(), VOCAB_SIZE, {BOS, EOS})
        matcher = compiler.compile(StructuredOutputs(regex="ab?"))
        seen = []
        for character in "ab":
            seen.append((matcher.allowed().nonzero().flatten().tolist(), matcher.is_finished))
            assert matcher.consume(_id(character))
        seen.append((matcher.allowed().nonzero().flatten().tolist(), matcher.is_finished))
        assert seen == [([_id("a")], False), ([_id("b"), BOS, EOS], False), ([BOS, EOS], True)]

    @pytest.mark.parametrize("vocab_size", [EOS + 1, 300, EOS - 20])
    def test_the_models_vocabulary_may_have_another_size(self, vocab_size: int) -> None:
        compiler = GrammarCompiler(tiny_tokenizer(), vocab_size, {EOS})
        allowed = compiler.compile(StructuredOutputs(regex="[a-z]*")).allowed()
        assert allowed.shape == (vocab_size,)
        ids = allowed.nonzero().flatten().tolist()
        ends = [EOS] if vocab_size > EOS else []
        assert ids == sorted(_id(chr(code)) for code in range(ord("a"), ord("z") + 1)) + ends

    def test_a_form_is_compiled_once_and_its_matchers_are_apart(
        self, compiler: GrammarCompiler
    ) -> None:
        first, second = (compiler.compile(StructuredOutputs(regex="ab")) for _ in range(2))
        assert first.consume(_id("a"))
        assert not second.consume(_id("b"))
        assert first.error is None
        assert second.error is not None
        assert not second.is_finished

    def test_from_several_threads(self, compiler: GrammarCompiler) -> None:
        def ends_of(index: int) -> bool:
            matcher = compiler.compile(StructuredOutputs(regex=f"a{{{1 + index % 40}}}"))
            for _ in range(1 + index % 40):
                assert matcher.allowed()[_id("a")]
                assert matcher.consume(_id("a"))
            return matcher.is_finished

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(ends_of, range(200)))

    def test_blanks_in_json_are_bounded(self, compiler: GrammarCompiler) -> None:
        accepted = {'{"a": 1}', '{"a":1}', '{\n  "a": 1\n}', '{ "a" : 1 }'}
        refused = {'{  "a": 1}', '{"a":\n\n1}', '{"a": 1}  '}
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        for text in accepted | refused:
            matcher = compiler.compile(StructuredOutputs(json=schema))
            fits = all(matcher.consume(_id(character)) for character in text)
            assert fits == (text in accepted), text


@pytest.mark.slow
def test_a_real_tokenizer_and_model() -> None:
    llm = LLM(smollm2(), kv_cache_memory_bytes=256 << 20, max_model_len=256, max_num_seqs=4)
    prompt = llm.engine.tokenize("Alice is 31 years old. As JSON: ")
    for temperature in (0, 1):
        params = structured(StructuredOutputs(json=PERSON), temperature=temperature, seed=4)
        completion = llm.generate([prompt], params)[0].outputs[0]
        assert completion.finish_reason == "stop"
        assert validates(json.loads(completion.text), PERSON), completion.text
    assert token_ids(llm, [prompt], GREEDY)


@lru_cache
def _id(character: str) -> int:
    """Token id of an ASCII character."""
    (token_id,) = tiny_tokenizer()(character).input_ids
    return int(token_id)


def _state(compiler: GrammarCompiler, params: SamplingParams) -> SamplingState:
    assert params.structured_outputs is not None
    grammar = compiler.compile(params.structured_outputs)
    return SamplingState.create(params, [1], 0, [EOS], grammar=grammar)


def _added(llm: LLM, name: str, params: SamplingParams) -> Request:
    return llm.engine.add_request(name, prompts(1)[0], params)
