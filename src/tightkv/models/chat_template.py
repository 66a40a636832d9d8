"""Conversations as text."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from tightkv.errors import RequestError
from tightkv.models.loader import LoadedModel

__all__ = ["render_chat"]


def render_chat(model: LoadedModel, messages: Seq[Mapping[str, Any]], **arguments: Any) -> str:
    """A conversation in the words of the model's chat template.

    Args:
        model: whose template.
        messages: each `{"role": ..., "content": ...}`.
        arguments: further variables of the template.

    Raises:
        RequestError: if the model has no template, or it cannot render these messages.
    """
    if model.tokenizer.chat_template is None:
        raise RequestError(
            f"{model.name} has no chat template: give one with --chat-template, or use plain text."
        )
    try:
        conversation: Any = list(messages)
        text = model.tokenizer.apply_chat_template(conversation, tokenize=False, **arguments)
    except Exception as error:  # a template is a program of somebody else
        reason = " ".join(str(error).split())
        raise RequestError(
            f"The chat template cannot render these messages ({reason}): check roles and contents."
        ) from error
    return str(text)
