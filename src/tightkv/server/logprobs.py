"""Log-probabilities as OpenAI's two APIs write them, and as vLLM writes those of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tightkv.engine.outputs import Logprob

__all__ = ["CompletionLogprobs", "TokenLogprobs", "chat_logprobs", "joined", "prompt_logprobs"]

_LEAST = -9999.0

TokenLogprobs = Mapping[int, Logprob]
"""Token id to log-probability at one position; the chosen or given token comes first."""


class CompletionLogprobs:
    """Log-probabilities of one choice of /v1/completions, in pieces as they come."""

    def __init__(self, num_top: int, as_token_ids: bool) -> None:
        """Begin a choice.

        Args:
            num_top: most probable tokens that were asked for, besides the chosen one.
            as_token_ids: tokens are written `token_id:17` in place of their text, which several
                tokens may share.
        """
        self._num_top = num_top
        self._as_token_ids = as_token_ids
        self._offset = 0
        self._pieces: list[dict[str, Any]] = []

    def first_of_prompt(self, token_id: int, text: str) -> dict[str, Any]:
        """The first token of a prompt, which nothing precedes."""
        return self._piece([_name(token_id, text, self._as_token_ids)], [None], [None])

    def take(self, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next positions."""
        named = [
            {
                _name_of(item, self._as_token_ids): _finite(item[1])
                for place, item in enumerate(position.items())
                if place == 0 or item[1].rank <= self._num_top
            }
            for position in positions
        ]
        chosen = [next(iter(position.items())) for position in positions]
        return self._piece(
            [_name_of(item, self._as_token_ids) for item in chosen],
            [_finite(item[1]) for item in chosen],
            named if self._num_top else [None] * len(named),
        )

    @property
    def all(self) -> dict[str, Any]:
        """All pieces in one."""
        return joined(self._pieces)

    def _piece(
        self,
        tokens: list[str],
        chosen: Sequence[float | None],
        top: Sequence[Mapping[str, float] | None],
    ) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        piece = {
            "tokens": tokens,
            "token_logprobs": list(chosen),
            "top_logprobs": list(top),
            "text_offset": offsets,
        }
        self._pieces.append(piece)
        return piece


def joined(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pieces of `CompletionLogprobs` as one."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [entry for piece in pieces for entry in piece[name]] for name in names}


def chat_logprobs(
    positions: Sequence[TokenLogprobs], num_top: int, as_token_ids: bool
) -> dict[str, Any]:
    """Log-probabilities of a piece of a chat answer.

    Args:
        positions: of the piece's tokens.
        num_top: most probable tokens per position, by rank.
        as_token_ids: as in `CompletionLogprobs`.
    """

    def entry(item: tuple[int, Logprob]) -> dict[str, Any]:
        token = _name_of(item, as_token_ids)
        return {
            "token": token,
            "logprob": _finite(item[1]),
            "bytes": list(token.encode("utf-8", errors="replace")),
        }

    content = []
    for position in positions:
        ranked = sorted(position.items(), key=lambda item: item[1].rank)[:num_top]
        chosen = next(iter(position.items()))
        content.append(entry(chosen) | {"top_logprobs": [entry(item) for item in ranked]})
    return {"content": content}


def prompt_logprobs(
    positions: Sequence[TokenLogprobs | None],
) -> list[dict[str, dict[str, Any]] | None]:
    """VLLM's `prompt_logprobs`: per position, token id to log-probability, rank and text."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": _finite(logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token_id, logprob in position.items()
        }
        for position in positions
    ]


def _finite(logprob: Logprob) -> float:
    """JSON has no infinity: what can never come is very unlikely, as in vLLM."""
    return max(logprob.logprob, _LEAST)


def _name_of(item: tuple[int, Logprob], as_token_ids: bool) -> str:
    return _name(item[0], item[1].decoded_token or "", as_token_ids)


def _name(token_id: int, text: str, as_token_ids: bool) -> str:
    return f"token_id:{token_id}" if as_token_ids else text
