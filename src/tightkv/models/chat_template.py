"""Conversations as text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from transformers import PreTrainedTokenizerBase

from tightkv.errors import RequestError
from tightkv.models.loader import LoadedModel

__all__ = ["check_template_arguments", "render_chat"]


def check_template_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse variables of a template that are arguments of its rendering.

    Raises:
        RequestError: names the first.
    """
    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name in arguments:
        if name in taken:
            raise RequestError(f"chat_template_kwargs may not have {name[:60]!r}: leave it out.")


def render_chat(model: LoadedModel, messages: Seq[Mapping[str, Any]], /, **arguments: Any) -> str:
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
