"""Requests of the HTTP API: OpenAI's fields, and vLLM's extra ones.

A field that nobody knows is refused, as OpenAI does, and so is a known one that would change the
answer and is not served; null is the same as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tightkv.engine.sampling_params import SamplingParams, StructuredOutputs

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Message",
    "SamplingRequest",
    "StreamOptions",
    "TokenizeRequest",
]

_MAX_N = 128  # OpenAI's limit
# Each is looked for after every token.
_MAX_STOPS, _MAX_STOP_LENGTH, _MAX_STOP_TOKENS = 64, 1024, 1024

# One error is enough: a long list of wrong things must not make a longer one.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
_Stop = Annotated[str, Field(max_length=_MAX_STOP_LENGTH)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(_Body):
    """What a stream tells besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


_SAMPLING_NAMES = (
    "n",
    "seed",
    "stop",
    "temperature",
    "top_p",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


class SamplingRequest(_Body):
    """Fields that both kinds of completion have."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MAX_STOPS, fail_fast=True)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    logit_bias: dict[int, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=_MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: int | None = None
    # They change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: set stream to true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not streamed: set stream to false")
        return self

    def sampling_params(
        self,
        defaults: Mapping[str, float],
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        structured_outputs: StructuredOutputs | None,
    ) -> SamplingParams:
        """What the engine is asked for; `defaults` are for what the request leaves open.

        Raises:
            InvalidSamplingParamsError: for a value outside its range.
        """
        given = {
            name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None
        }
        return SamplingParams(
            **{**defaults, **given},
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=structured_outputs,
        )


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if not self.prompt and not isinstance(self.prompt, str):
            raise ValueError("prompt is an empty list: give at least one prompt")
        if self.suffix:
            raise ValueError("suffix is not served: leave it out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not served: leave it out, or set it to n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which only makes sense with echo: raise it")
        return self


class Message(_Body):
    """One message of a conversation; what a template does with further fields is its affair."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class ChatCompletionRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Only what is served anyway.
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none"] | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set it to true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt contradict: set one of them"
            )
        return self


class TokenizeRequest(_Body):
    """POST /tokenize: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
