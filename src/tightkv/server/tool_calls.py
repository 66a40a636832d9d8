"""Tool calls of the chat API: what a request asks for, and a form for the model's text.

A model writes calls in the words of its chat template (`STYLES`). Where a request insists on a
call, a grammar makes the model write one; where it does not, a call is recognised by its function's
name. Text that begins like a call and turns out to be none is content, to the last character.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tightkv.engine.grammar import json_rule
from tightkv.engine.sampling_params import StructuredOutputs
from tightkv.errors import RequestError
from tightkv.server.response_format import unless_strict
from tightkv.server.tool_call_reader import ToolCallReader
from tightkv.server.tool_call_styles import ToolCallStyle, style_of

__all__ = ["ToolCallPlan", "plan_tool_calls", "with_arguments_as_objects"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallPlan:
    """What a chat request wants of tools.

    Attributes:
        style: how the model writes calls.
        functions: schema of the arguments of each function that may be called; without any,
            the text is left as it is.
        must_call: whether the answer has to be a call.
        at_most_one: whether further calls are dropped.
        special_token_ids: of the style's marks, those that are special tokens.
    """

    style: ToolCallStyle
    functions: Mapping[str, Mapping[str, object]]
    must_call: bool
    at_most_one: bool
    special_token_ids: Mapping[str, int]

    @property
    def needs_special_tokens(self) -> bool:
        """Whether calls can be read only from text with `skip_special_tokens=False`."""
        return bool(self.functions and self.special_token_ids)

    def structured_outputs(self, content: StructuredOutputs | None) -> StructuredOutputs | None:
        """The form of the whole answer.

        Args:
            content: the form of an answer that is no call, from `response_format` and the like.

        Returns:
            The calls, where there must be one; where there may be and the content is JSON, either;
            else `content`.
        """
        if self.must_call:
            return StructuredOutputs(grammar="\n".join(["start: calls", *self._rules()]))
        schema = _schema_of(content)
        if not self.functions or schema is None:
            return content
        rules = ["start: calls | content", f"content: {json_rule(schema)}", *self._rules()]
        return StructuredOutputs(grammar="\n".join(rules))

    def new_reader(self) -> ToolCallReader:
        """What reads the calls of one choice."""
        return ToolCallReader(
            self.style if self.functions else None,
            frozenset(self.functions),
            at_most_one=self.at_most_one,
            has_content=not self.must_call,
        )

    def _rules(self) -> list[str]:
        calls = self.style.one if self.at_most_one else self.style.several
        calls = calls.replace("MARK", self._terminal(self.style.mark))
        calls = calls.replace("END", self._terminal(self.style.end))
        rules = [f"calls: {calls}"]
        for index, (name, schema) in enumerate(self.functions.items()):
            head = f'{{"name": {json.dumps(name)}, "{self.style.arguments_key}": '
            # The schema stands alone, so that references inside it are found.
            rules.append(f'call_{index}: {json.dumps(head)} arguments_{index} "}}"')
            rules.append(f"arguments_{index}: {json_rule(schema)}")
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(self.functions))))
        return rules

    def _terminal(self, text: str) -> str:
        token_id = self.special_token_ids.get(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def plan_tool_calls(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    parallel_tool_calls: bool | None,
    tokenizer: PreTrainedTokenizerBase,
) -> ToolCallPlan:
    """Understand `tools`, `tool_choice` and `parallel_tool_calls` of a chat request.

    Args:
        tools: each `{"type": "function", "function": {"name", "description", "parameters"}}`.
        tool_choice: "none", "auto", "required", or `{"type": "function", "function": {"name"}}`;
            None is "auto" where there are tools.
        parallel_tool_calls: False limits the answer to one call.
        tokenizer: with the chat template.

    Raises:
        RequestError: if one of them is malformed, or the choice is none of the tools.
    """
    functions = _functions(tools or ())
    choice = ("auto" if functions else "none") if tool_choice is None else tool_choice
    named = None
    if choice == "none":
        functions = {}
    elif choice not in ("auto", "required"):
        named = _chosen_name(choice, functions)
        functions = {named: functions[named]}
    elif choice == "required" and not functions:
        raise RequestError('tool_choice is "required", and there are no tools: send some.')
    style = style_of(tokenizer)
    return ToolCallPlan(
        style=style,
        functions=functions,
        must_call=bool(named) or choice == "required",
        at_most_one=bool(named) or parallel_tool_calls is False,
        special_token_ids=_special_token_ids(tokenizer, (style.mark, style.end)),
    )


def with_arguments_as_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates want it: arguments of its calls as objects, not as their JSON.

    Raises:
        RequestError: if the arguments of a call are not the JSON of an object.
    """
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError("A message's tool_calls are no list: send a list of calls.")
    return {**message, "tool_calls": [_decoded(call) for call in calls]}


def _schema_of(form: StructuredOutputs | None) -> Mapping[str, object] | None:
    """The JSON schema of a form; None if it has another kind."""
    if form is None:
        return None
    if form.json_object:
        return {"type": "object"}
    if not isinstance(form.json, str):
        return form.json
    try:
        schema = json.loads(form.json)
    except (ValueError, RecursionError):
        return None  # the engine refuses it
    return schema if isinstance(schema, dict) else None


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, object]]:
    functions: dict[str, Mapping[str, object]] = {}
    for tool in tools:
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise RequestError(
                "Each of tools must be a function, as in "
                f'{{"type": "function", "function": {{"name": "f"}}}}, got {str(tool)[:60]!r}.'
            )
        name = function.get("name")
        if not isinstance(name, str) or not name or name in functions:
            raise RequestError(f"Each of tools needs a name of its own, got {str(name)[:60]!r}.")
        functions[name] = _arguments_schema(name, function)
    return functions


def _arguments_schema(name: str, function: Mapping[str, Any]) -> Mapping[str, object]:
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise RequestError(
            f"The parameters of function {name[:60]!r} must be a JSON schema of an object, got "
            f"{str(schema)[:60]!r}."
        )
    return unless_strict({"type": "object", **schema}, function.get("strict"))


def _chosen_name(choice: str | Mapping[str, Any], functions: Mapping[str, object]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    is_choice = isinstance(choice, Mapping) and choice.get("type") == "function"
    if not is_choice or not isinstance(name, str):
        raise RequestError(
            "tool_choice must be 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": "f"}}, got '
            f"{str(choice)[:60]!r}."
        )
    if name not in functions:
        raise RequestError(
            f"tool_choice wants function {name[:60]!r}, and tools have "
            f"{', '.join(map(repr, functions)) or 'none'}; choose one of them."
        )
    return name


def _special_token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> dict[str, int]:
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    return {text: special[text] for text in texts if text in special}


def _decoded(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        decoded = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        raise RequestError(
            "The arguments of a tool call in messages must be the JSON of an object, got "
            f"{arguments[:60]!r}."
        )
    return {**call, "function": {**function, "arguments": decoded}}
