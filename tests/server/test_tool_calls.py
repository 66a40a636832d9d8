"""Tool calls: asked for, made by a model that knows nothing, and read whole or in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tightkv import LLM, SamplingParams
from tightkv.engine.grammar import GrammarCompiler
from tightkv.engine.sampling_params import StructuredOutputs
from tightkv.errors import RequestError
from tightkv.server.tool_call_reader import Delta, ToolCallReader
from tightkv.server.tool_call_styles import STYLES, style_of
from tightkv.server.tool_calls import ToolCallPlan, plan_tool_calls, with_arguments_as_objects
from tiny_engine import prompts, tiny_llm
from tiny_models import EOS, save_tiny_model, tiny_tokenizer

NAMES = frozenset({"add", "now"})
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"$ref": "#/$defs/digit"}},
                "required": ["a", "b"],
                "additionalProperties": False,
                "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "What time it is."}},
]
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
TEMPLATES = {
    "hermes": "{% if tools %}Answer with <tool_call>{% endif %}",
    "mistral": "{{ '[TOOL_CALLS]' }}",
    "llama3_json": '{"name": function name, "parameters": dictionary of argument name and value}',
}
# Texts in the styles, with their content and calls.
ANSWERS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        'Hi.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Hi.",
        [("now", {})],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": "</tool_call>{\\"", "b": [1]}, "name": "add"}</tool_call>\n'
        '<tool_call>\n{"name": "now"}',
        "",
        [("add", {"a": '</tool_call>{"', "b": [1]}), ("now", {})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": "{}"}</tool_call> Done.',
        "Done.",
        [("now", {})],
    ),
    ("hermes", '<tool_call><tool_call>{"name": "now"}', "<tool_call>", [("now", {})]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        "",
        [("add", {"a": 1}), ("now", {})],
    ),
    ("llama3_json", ' {"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"type": "x", "name": "now"}',
        "",
        [("add", {"a": 1}), ("now", {})],
    ),
    ("llama3_json", '{"name": "now"}; then', "; then", [("now", {})]),
    ("mistral", '[TOOL_CALLS][{"name": "now"}, 5] x', ", 5] x", [("now", {})]),
    # Once its arguments are open it is a call, and they are the model's words.
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}', "", [("add", '{"a": NaN}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\', "", [("add", '{"a": "\\')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {} </tool_call>.', ".", [("now", {})]),
    (
        "llama3_json",
        '{"type": "function", "name": "n\\u006fw", "parameters": { }, "x": "}"} Done.',
        "Done.",
        [("now", {})],
    ),
]
NO_CALLS = [
    ("hermes", "a <tool_call> is\n a tag <tool"),
    ("hermes", '<tool_call>{"name": "unknown"}</tool_call>'),
    ("hermes", '<tool_call>{"name": now}'),
    ("hermes", ' <tool_call>{"name": "now'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}'),
    ("hermes", '<tool_call>{"arguments": {"x": NaN}, "name": "now"}'),
    ("hermes", '{"name": "now"}'),
    ("mistral", "[TOOL_CALLS] []"),
    ("llama3_json", '{"answer": 5}\n'),
    ("llama3_json", 'So {"name": "now"}'),
    ("llama3_json", "<|python_tag|>print(5)"),
]


def tokenizer_for(style: str, *special: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[style]
    if special:
        tokens: list[Any] = [AddedToken(text, special=True, normalized=False) for text in special]
        tokenizer.add_tokens(tokens, special_tokens=True)
    return tokenizer


def plan(
    style: str = "hermes", choice: Any = None, tools: Any = TOOLS, parallel: bool | None = None
) -> ToolCallPlan:
    return plan_tool_calls(tools, choice, parallel, tokenizer_for(style))


def read(reader: ToolCallReader, pieces: Iterable[str]) -> list[Delta]:
    return [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()


def content_and_calls(deltas: Sequence[Delta]) -> tuple[str, list[tuple[str, Any]]]:
    """What a client makes of deltas; arguments that are no JSON are left as they are."""
    names: list[str] = []
    arguments: list[str] = []
    ids = set()
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if "id" in call:
            assert (call["index"], call["type"]) == (len(names), "function")
            names.append(call["function"]["name"])
            arguments.append("")
            ids.add(call["id"])
        else:
            assert set(call) == {"index", "function"}
            assert set(call["function"]) == {"arguments"}
        assert call["index"] == len(names) - 1
        arguments[-1] += call["function"]["arguments"]
    assert len(ids) == len(names)
    content = "".join(delta.get("content", "") for delta in deltas)
    return content, [*zip(names, map(_decoded, arguments), strict=True)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(save_tiny_model(tmp_path_factory.mktemp("models") / "llama"))


class TestReader:
    @pytest.mark.parametrize(("style", "text", "content", "calls"), ANSWERS)
    def test_content_and_calls(
        self, style: str, text: str, content: str, calls: list[tuple[str, Any]]
    ) -> None:
        for pieces in ([text], text):  # whole, and by character
            reader = plan(style).new_reader()
            assert content_and_calls(read(reader, pieces)) == (content, calls)
            assert reader.num_calls == len(calls)

    @pytest.mark.parametrize(("style", "text"), NO_CALLS)
    def test_what_is_no_call_is_content(self, style: str, text: str) -> None:
        for pieces in ([text], text):
            assert content_and_calls(read(plan(style).new_reader(), pieces)) == (text, [])

    def test_a_call_is_told_by_its_name_and_then_its_arguments_as_they_come(self) -> None:
        reader = plan().new_reader()
        assert reader.feed("Well, ") == [{"content": "Well,"}]
        assert reader.feed("<tool_call>") == []
        assert reader.feed('\n{"name": "add", "arguments": ') == []
        delta, more = reader.feed('{"a"')
        (call,) = delta["tool_calls"]
        assert call["id"].startswith("call_")
        assert {**call, "id": ""} == {
            "index": 0,
            "id": "",
            "type": "function",
            "function": {"name": "add", "arguments": ""},
        }
        assert more == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}
        (more,) = reader.feed(": 1}")
        assert more == {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}
        assert reader.feed("}\n</tool_call>") == reader.finish() == []

    def test_a_call_written_in_another_way_is_told_when_it_is_whole(self) -> None:
        reader = plan().new_reader()
        assert reader.feed('<tool_call>{"arguments": {"a": 1}, "name": "add"') == []
        (delta,) = reader.feed("}")
        assert delta["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}

    @pytest.mark.parametrize("style", STYLES)
    def test_a_call_that_was_cut_is_no_content_where_there_must_be_calls(self, style: str) -> None:
        text = {
            "hermes": '<tool_call>\n{"name": "now"}\n</tool_call>\n<tool_call>\n{"name": "no',
            "mistral": '[TOOL_CALLS][{"name": "now"}, {"na',
            "llama3_json": '{"name": "now"}; {"na',
        }[style]
        for pieces in ([text], text):
            reader = plan(style, "required").new_reader()
            assert content_and_calls(read(reader, pieces)) == ("", [("now", {})])

    @pytest.mark.parametrize("choice", ["none", None])
    def test_without_tools_text_is_left_as_it_is(self, choice: str | None) -> None:
        reader = plan(choice=choice, tools=TOOLS if choice else None).new_reader()
        text = '<tool_call>{"name": "now"}</tool_call>'
        assert read(reader, [text[:5], "", text[5:]]) == [
            {"content": text[:5]},
            {"content": text[5:]},
        ]

    @pytest.mark.parametrize("style", STYLES)
    def test_calls_beyond_the_first_are_dropped_if_one_is_the_limit(self, style: str) -> None:
        text = {
            "hermes": '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "add"}',
            "mistral": '[TOOL_CALLS][{"name": "now"}, {"name": "add"}]',
            "llama3_json": '{"name": "now"}; {"name": "add"}',
        }[style]
        reader = plan(style, parallel=False).new_reader()
        assert content_and_calls(read(reader, [text])) == ("", [("now", {})])


PARTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "<|python_tag|>",
            "<tool",
            "]",
            "; ",
            "\n",
        ),
        *(" ", "text", '"', "\\", "{", "}", '{"a": 1}', '{"name": "now", "arguments": {}}'),
        *('{"name": "add", "parameters": {"a": "}\\"<tool_call>"}}', '[{"name": "now"}, 5]'),
        '[{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": null}}]',
        '{"name": "add", "arguments": {"a": "',
    ]
)


class TestPieces:
    @pytest.mark.parametrize("style", STYLES)
    @given(parts=st.lists(PARTS, max_size=12), data=st.data())
    def test_where_the_text_is_cut_does_not_matter(
        self, style: str, parts: list[str], data: st.DataObject
    ) -> None:
        text = "".join(parts)
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=9).map(sorted))
        pieces = [
            text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
        ]
        whole, cut = (
            content_and_calls(read(ToolCallReader(STYLES[style], NAMES), given_pieces))
            for given_pieces in ([text], pieces)
        )
        assert cut == whole
        if not whole[1]:
            assert whole[0] == text

    @given(
        words=st.lists(st.sampled_from(["Hm. ", "a < b", "", "{x}", "[1]"]), max_size=4),
        values=st.lists(st.text(max_size=8), min_size=1, max_size=3),
        size=st.integers(1, 9),
    )
    def test_markup_of_calls_is_never_content(
        self, words: list[str], values: list[str], size: int
    ) -> None:
        calls = [("add", {"a": value}) for value in values]
        bodies = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
        content = "".join(words)
        text = content + "".join(f"<tool_call>\n{body}\n</tool_call>\n" for body in bodies)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        reader = ToolCallReader(STYLES["hermes"], NAMES)
        assert content_and_calls(read(reader, pieces)) == (content.rstrip(), calls)


class TestPlan:
    @pytest.mark.parametrize("style", STYLES)
    def test_the_style_is_told_by_the_chat_template(self, style: str) -> None:
        tokenizer = tokenizer_for(style)
        assert style_of(tokenizer) is STYLES[style]
        named: Any = {"default": "", "tool_use": TEMPLATES[style]}
        tokenizer.chat_template = named
        assert style_of(tokenizer) is STYLES[style]
        tokenizer.chat_template = None
        assert style_of(tokenizer) is STYLES["hermes"]

    def test_a_form_only_where_a_call_must_be(self) -> None:
        json_object = StructuredOutputs(json_object=True)
        for no_tools in (plan(choice="none"), plan(tools=None), plan(tools=[])):
            assert no_tools.structured_outputs(None) is None
            assert no_tools.structured_outputs(json_object) is json_object
        regex = StructuredOutputs(regex="a")
        assert plan().structured_outputs(None) is None
        assert plan().structured_outputs(regex) is regex
        for choice in ("required", ADD):
            form = plan(choice=choice).structured_outputs(json_object)
            assert form is not None
            assert form.grammar is not None

    @pytest.mark.parametrize("style", STYLES)
    @pytest.mark.parametrize("parallel", [None, False])
    @pytest.mark.parametrize("choice", ["required", ADD], ids=["required", "named"])
    def test_a_model_that_knows_nothing_makes_the_calls(
        self, llm: LLM, style: str, choice: Any, parallel: bool | None
    ) -> None:
        called = set()
        for seed in range(4):
            chosen = plan(style, choice, parallel=parallel)
            text, calls = _made(llm, chosen, None, seed)
            assert calls
            assert not text
            assert len(calls) == 1 or (choice == "required" and parallel is None)
            for name, arguments in calls:
                called.add(name)
                wanted = {"a", "b"} if name == "add" else set()
                assert set(arguments) == wanted
                assert all(0 <= value <= 9 for value in arguments.values())
        assert called <= ({"add"} if choice is ADD else NAMES)

    def test_a_call_or_json(self, llm: LLM) -> None:
        answer = StructuredOutputs(json={"type": "integer", "minimum": 0, "maximum": 99})
        chosen = plan()
        for text in ("57", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'):
            assert _accepts(chosen.structured_outputs(answer), text)
        assert not _accepts(chosen.structured_outputs(answer), '"57"')
        for seed in range(4):
            text, calls = _made(llm, chosen, answer, seed)
            assert calls or 0 <= json.loads(text) <= 99

    def test_a_mark_that_is_a_special_token_is_written_as_one(self) -> None:
        tokenizer = tokenizer_for("mistral", "[TOOL_CALLS]")
        chosen = plan_tool_calls(TOOLS, "required", None, tokenizer)
        assert chosen.needs_special_tokens
        assert not plan("mistral").needs_special_tokens
        assert not plan_tool_calls(TOOLS, "none", None, tokenizer).needs_special_tokens
        form = chosen.structured_outputs(None)
        assert form is not None
        matcher = GrammarCompiler(tokenizer, len(tokenizer), {EOS}).compile(form)
        mark = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
        assert matcher.allowed().nonzero().flatten().tolist() == [mark]

    @pytest.mark.parametrize(
        ("tools", "choice"),
        [
            ([{"type": "retrieval"}], None),
            ([{"type": "function"}], None),
            ([{"type": "function", "function": {"name": ""}}], None),
            ([{"type": "function", "function": {"name": ["f"]}}], None),
            ([*TOOLS, *TOOLS], None),
            ([{"type": "function", "function": {"name": "f", "parameters": []}}], None),
            (
                [{"type": "function", "function": {"name": "f", "parameters": {"type": "null"}}}],
                None,
            ),
            (None, "required"),
            (None, ADD),
            (TOOLS, "maybe"),
            (TOOLS, {"type": "function"}),
            (TOOLS, {"type": "function", "function": {"name": ["add"]}}),
            (TOOLS, {"type": "function", "function": {"name": "sub"}}),
            (TOOLS, {"type": "allowed_tools", "function": {"name": "add"}}),
        ],
    )
    def test_what_is_malformed_is_refused(self, tools: Any, choice: Any) -> None:
        with pytest.raises(RequestError) as caught:
            plan(choice=choice, tools=tools)
        assert "\n" not in str(caught.value)

    def test_keywords_not_served_are_passed_over_unless_strict(self) -> None:
        parameters = {"type": "object", "not": {}, "properties": {"a": {"type": "null"}}}
        for strict in (None, True):
            function = {"name": "f", "parameters": parameters, "strict": strict}
            chosen = plan(choice="required", tools=[{"type": "function", "function": function}])
            form = chosen.structured_outputs(None)
            text = '<tool_call>\n{"name": "f", "arguments": {"a": null}}\n</tool_call>'
            if strict:
                with pytest.raises(RequestError, match="not"):
                    _accepts(form, text)
            else:
                assert _accepts(form, text)


class TestMessages:
    def test_arguments_become_objects(self) -> None:
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "f", "arguments": '{"a": 1}'},
        }
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        shown = with_arguments_as_objects(message)
        assert shown["tool_calls"][0]["function"]["arguments"] == {"a": 1}
        assert with_arguments_as_objects(shown) == shown
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
        plain = {"role": "user", "content": "hi"}
        assert with_arguments_as_objects(plain) == plain

    @pytest.mark.parametrize("calls", ["x", 5, [{"function": {"arguments": "{"}}]])
    def test_what_is_malformed_is_refused(self, calls: Any) -> None:
        with pytest.raises(RequestError):
            with_arguments_as_objects({"role": "assistant", "tool_calls": calls})


def _decoded(arguments: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return json.loads(arguments, parse_constant=refuse)
    except ValueError:
        return arguments


def _made(
    llm: LLM, chosen: ToolCallPlan, content: StructuredOutputs | None, seed: int
) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of an answer, which must have come to its end."""
    params = SamplingParams(
        structured_outputs=chosen.structured_outputs(content),
        max_tokens=None,
        seed=seed,
        logit_bias={EOS: 9},  # a random model likes to go on
    )
    completion = llm.generate(prompts(1), params)[0].outputs[0]
    assert completion.finish_reason == "stop", completion.text
    return content_and_calls(read(chosen.new_reader(), completion.text))


def _accepts(form: StructuredOutputs | None, text: str) -> bool:
    assert form is not None
    tokenizer = tiny_tokenizer()
    matcher = GrammarCompiler(tokenizer, len(tokenizer), {EOS}).compile(form)
    ids = tokenizer(text).input_ids
    return all(matcher.consume(token_id) for token_id in ids) and bool(matcher.allowed()[EOS])
