"""How models write tool calls: one style a family, told by the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["STYLES", "ToolCallStyle", "style_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallStyle:
    """How models of one family write calls.

    Attributes:
        template_marks: any of these in a chat template tells the style.
        mark: what announces a call, or a list of calls.
        end: what may follow a call; empty if nothing.
        separator: what may stand between two calls of which the second has no mark.
        arguments_key: where a call's object has its arguments; the other spelling is read, too.
        has_bare_calls: whether a text may begin with a call that has no mark.
        one: a Lark expression for one call; `call` is the call's object.
        several: the same for one call or more.
    """

    template_marks: tuple[str, ...]
    mark: str
    end: str = ""
    separator: str = ""
    arguments_key: str = "arguments"
    has_bare_calls: bool = False
    one: str
    several: str


STYLES: Mapping[str, ToolCallStyle] = {
    "hermes": ToolCallStyle(
        template_marks=("<tool_call>",),
        mark="<tool_call>",
        end="</tool_call>",
        one=r'MARK "\n" call "\n" END',
        several=r'MARK "\n" call "\n" END ("\n" MARK "\n" call "\n" END)*',
    ),
    "mistral": ToolCallStyle(
        template_marks=("[TOOL_CALLS]",),
        mark="[TOOL_CALLS]",
        one='MARK "[" call "]"',
        several='MARK "[" call (", " call)* "]"',
    ),
    "llama3_json": ToolCallStyle(
        template_marks=("<|python_tag|>", '{"name": function name, "parameters":'),
        mark="<|python_tag|>",
        separator=";",
        arguments_key="parameters",
        has_bare_calls=True,
        one="call",
        several='call ("; " call)*',
    ),
}
"""The first whose mark stands in the chat template is taken, else "hermes"."""


def style_of(tokenizer: PreTrainedTokenizerBase) -> ToolCallStyle:
    """How a model writes calls, by its chat template."""
    template: Any = tokenizer.chat_template or ""
    text = template if isinstance(template, str) else "\n".join(map(str, template.values()))
    for style in STYLES.values():
        if any(mark in text for mark in style.template_marks):
            return style
    return STYLES["hermes"]
