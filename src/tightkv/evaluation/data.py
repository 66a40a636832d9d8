"""The user's text: as prompts to answer, and as windows of tokens to force."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tightkv.calibration.data import (
    MIN_TOKENS,
    Document,
    check_window,
    digest,
    shuffled_pieces,
    tokenize_document,
)
from tightkv.config import EvaluationConfig
from tightkv.errors import RequestError
from tightkv.models import LoadedModel, render_chat

__all__ = ["EvaluationText", "Prompt", "cut_text"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is asked to continue.

    Attributes:
        continuation: how the user's own text goes on; empty where it ends with the prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    continuation: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """Pieces of the user's text, shuffled.

    Attributes:
        prompts: the first pieces, split into prompt and continuation.
        rest: tokens of further pieces.
        sha256: of all documents.
    """

    prompts: tuple[Prompt, ...]
    rest: tuple[int, ...]
    sha256: str

    def windows(
        self, answers: Sequence[Sequence[int]], config: EvaluationConfig
    ) -> list[list[int]]:
        """At most `num_samples` windows of `max_seq_len` tokens; only the last may be shorter.

        Args:
            answers: the baseline's, one per prompt; they complete prompts without continuation.
            config: sizes; none is None.

        Raises:
            RequestError: if there is too little text.
        """
        tokens: list[int] = []
        for prompt, answer in zip(self.prompts, answers, strict=True):
            tokens += [*prompt.token_ids, *(prompt.continuation or answer)]
        tokens += self.rest
        if len(tokens) < MIN_TOKENS:
            raise RequestError(
                f"The text has {len(tokens)} tokens with the answers to it: give at least "
                f"{MIN_TOKENS}, better some thousand."
            )
        size = config.max_seq_len or 0
        starts = range(0, min(len(tokens), config.num_samples * size), size)
        windows = [tokens[start : start + size] for start in starts]
        return [window for window in windows if len(window) >= MIN_TOKENS]


def cut_text(
    documents: Sequence[Document], model: LoadedModel, config: EvaluationConfig
) -> EvaluationText:
    """Prompts, and as much text as the windows need.

    A conversation's prompt is all before the last answer; a text's is its first `prompt_len`
    tokens.

    Args:
        documents: texts and conversations.
        model: whose tokenizer and chat template are taken.
        config: sizes; none is None.

    Raises:
        RequestError: if there is no text, or a window is longer than the model's positions.
    """
    max_seq_len = config.max_seq_len or 0
    check_window(model, config.num_samples, max_seq_len)
    pieces = shuffled_pieces(documents, max_seq_len, config.seed)
    if not pieces:
        raise RequestError("--data has no text: give prompts, conversations or a text file.")
    asked = pieces[: config.num_prompts]
    prompts = tuple(_prompt(piece, model, config.prompt_len) for piece in asked)
    wanted = config.num_samples * max_seq_len - sum(
        len(prompt.token_ids) + len(prompt.continuation) for prompt in prompts
    )
    rest = _tokens(pieces[config.num_prompts :], model, wanted)
    return EvaluationText(prompts, tuple(rest), digest(documents))


def _tokens(pieces: Iterable[Document], model: LoadedModel, wanted: int) -> list[int]:
    tokens: list[int] = []
    for piece in pieces:
        if len(tokens) >= wanted:
            break
        tokens += tokenize_document(piece, model)
    return tokens[: max(wanted, 0)]


def _prompt(document: Document, model: LoadedModel, prompt_len: int) -> Prompt:
    whole = tokenize_document(document, model)
    if isinstance(document, str):
        ids = tuple(whole[:prompt_len])
        text = str(model.tokenizer.decode(list(ids), skip_special_tokens=True))
        return Prompt(text, ids, tuple(whole[prompt_len:]))
    is_answered = document[-1].get("role") == "assistant"
    asked = document[:-1] if is_answered else document
    text = render_chat(model, asked, add_generation_prompt=True)
    ids = tuple(model.tokenizer(text, add_special_tokens=False).input_ids)
    continues = is_answered and tuple(whole[: len(ids)]) == ids
    return Prompt(text, ids, tuple(whole[len(ids) :]) if continues else ())
