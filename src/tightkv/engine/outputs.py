"""What a request gets back, spelled as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tightkv.errors import TightKVError

__all__ = [
    "CompletionDelta",
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "RequestDelta",
    "RequestOutput",
]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm of the model's own probability, before any sampling parameter.
        rank: 1 for the most probable token; of equally probable ones the lower id comes first.
        decoded_token: text of the token alone, where there is a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` completions of a request.

    Attributes:
        index: from 0 to `n - 1`.
        text: the text so far; without the stop string, unless that was asked for.
        token_ids: the tokens so far, with those that a stop string has cut from the text.
        finish_reason: None while it is running.
        stop_reason: the stop string or stop token that ended it; None for end-of-sequence.
        cumulative_logprob: sum over `token_ids`; None if no log-probabilities were asked for.
        logprobs: per token of `token_ids`, token id to log-probability, the chosen one first.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and its completions, as they are now.

    Attributes:
        request_id: as given or assigned when the request was added.
        prompt: the text; None if the request came as token ids.
        prompt_token_ids: the prompt, tokenized.
        outputs: `n` completions in the order of their index.
        finished: whether all of them are finished.
        num_cached_tokens: prompt tokens whose K and V came from the prefix cache.
        prompt_logprobs: per prompt token, token id to log-probability; None for the first one,
            which nothing precedes.
        error: why the request failed; None if it did not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """What has come to a completion since it was last asked for; pieces add up to the whole.

    Attributes:
        index: from 0 to `n - 1`.
        text: new text; lags behind the tokens where a character or a stop string is open.
        token_ids: new tokens.
        logprobs: of the new tokens; None if none were asked for.
        finish_reason: None while it is running.
        stop_reason: as in `CompletionOutput`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDelta:
    """What has come to a request since it was last asked for.

    Attributes:
        completions: those that have changed.
        finished, num_cached_tokens: as in `RequestOutput`.
        prompt_logprobs: of the whole prompt, once, as soon as they are complete.
        failure: what to raise if the request failed: a RequestError if it is itself wrong.
    """

    completions: tuple[CompletionDelta, ...]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None
    failure: TightKVError | None = None
