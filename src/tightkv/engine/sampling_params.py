"""What one request asks of the sampler, spelled as in vLLM."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType

from tightkv.errors import InvalidSamplingParamsError

__all__ = ["GREEDY_TEMPERATURE", "SamplingParams", "StructuredOutputs"]

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one are greedy."""

_MAX_LOGIT_BIAS = 100.0

# Beyond these, logits in float32 become infinite, or all the same.
_MAX_TEMPERATURE = 1e6
_LEAST_REPETITION_PENALTY, _MAX_REPETITION_PENALTY = 1e-3, 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What form the text must have: exactly one of these, spelled as in vLLM.

    Attributes:
        json: a JSON schema, as an object or its text.
        json_object: any JSON object.
        regex: a regular expression, in the syntax of Rust's crate `regex`, for the whole text.
        choice: the text is one of these.
        grammar: a grammar in llguidance's kind of Lark; its first rule is `start`.

    Raises:
        InvalidSamplingParamsError: if none or several are given, or one is of a wrong type.
    """

    json: str | Mapping[str, object] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        forms = (self.json, self.json_object or None, self.regex, self.choice, self.grammar)
        count = sum(form is not None for form in forms)
        if count != 1:
            _refuse(
                "structured_outputs needs exactly one of json, json_object, regex, choice and "
                f"grammar, got {count} of them; keep one."
            )
        _check_type("json", self.json, str | Mapping, "a JSON schema or its text")
        _check_type("json_object", self.json_object, bool, "true or false")
        _check_type("regex", self.regex, str, "a string")
        _check_type("grammar", self.grammar, str, "a string")
        if self.choice is not None:
            _check_choice(self.choice)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and where they end.

    Names, defaults and meaning are vLLM's. The logits are changed in this order: `logit_bias`,
    `structured_outputs`, `min_tokens`, penalties, `temperature`, `min_p`, `top_k`, `top_p`.

    Attributes:
        n: completions per prompt.
        temperature: divides the logits, up to 1e6; below 1e-5 the most probable token is taken.
        top_p: keep the most probable tokens whose probabilities reach this sum.
        top_k: keep this many most probable tokens and those tied with the last; 0 or -1 keeps all.
        min_p: keep tokens at least this probable, relative to the most probable one.
        repetition_penalty: for each token of prompt or output, divides a positive logit and
            multiplies a negative one (CTRL, arXiv:1909.05858); from 0.001 to 1000.
        presence_penalty: taken once from the logit of each token of the output.
        frequency_penalty: taken from a token's logit once for each time the output holds it.
        seed: makes the request reproducible; None leaves the choice to the engine.
        max_tokens: most tokens to generate; None is up to the model's limit.
        min_tokens: tokens generated before end-of-sequence, stop token or stop string may end it.
        stop: string or strings that end the text, and are not part of it.
        stop_token_ids: tokens that end the sequence.
        ignore_eos: go on after the end-of-sequence token.
        logit_bias: per token id, what is added to its logit, from -100 to 100.
        logprobs: log-probabilities of this many most probable tokens and of the chosen one;
            0 is the chosen one only, -1 the full vocabulary, None nothing.
        prompt_logprobs: the same for each token of the prompt.
        include_stop_str_in_output: leave the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text; without it the text is empty.
        forced_token_ids: teacher forcing: these tokens are taken instead of sampled ones, and the
            sequence ends exactly when they run out; no end-of-sequence token ends it earlier.
            The sum of their log-probabilities is reported. Evaluation stands on it: quality is
            measured on the path that serves.
        structured_outputs: the form that the text must have. It alone says where the text ends:
            at an end-of-sequence token, which it allows where the text is complete, or where
            nothing else may follow. So `ignore_eos`, `stop` and `stop_token_ids` do not act,
            `min_tokens` only while the form leaves a choice; `max_tokens` still cuts.

    Raises:
        InvalidSamplingParamsError: for a value outside its range, or values that contradict.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    forced_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_numbers()
        self._check_logit_bias()
        self._check_stop()
        self._check_forced()
        self._check_structured()
        if self.is_greedy and self.n > 1:
            _refuse(f"n must be 1 when using greedy sampling, got {self.n}; raise temperature.")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings that act, as a tuple; empty if there are none."""
        if self.structured_outputs is not None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def ends_at_eos(self) -> bool:
        """Whether an end-of-sequence token ends the sequence."""
        if self.forced_token_ids is not None:
            return False
        return self.structured_outputs is not None or not self.ignore_eos

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens of `stop_token_ids` that act."""
        decided_elsewhere = self.forced_token_ids or self.structured_outputs
        return frozenset(() if decided_elsewhere else self.stop_token_ids or ())

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def check_against_vocabulary(
        self, vocab_size: int, eos_token_ids: Collection[int] = ()
    ) -> None:
        """Refuse token ids that the model does not have, and a minimum that no token can reach.

        Args:
            vocab_size: number of logits per row; ids go from 0 to `vocab_size - 1`.
            eos_token_ids: the model's end-of-sequence tokens.

        Raises:
            InvalidSamplingParamsError: names the field and the first such id.
        """
        _check_ids("logit_bias", self.logit_bias or (), vocab_size)
        _check_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        _check_ids("forced_token_ids", self.forced_token_ids or (), vocab_size)
        ends = {*self.stop_tokens, *(eos_token_ids if self.ends_at_eos else ())}
        if self.min_tokens > 0 and len(ends) >= vocab_size and not self.forced_token_ids:
            _refuse(
                f"min_tokens={self.min_tokens} rules out every token of this model, since each of "
                "them ends the answer; lower min_tokens or shorten stop_token_ids."
            )

    def _check_counts(self) -> None:
        _check_count("n", self.n, least=1)
        _check_count("top_k", self.top_k, least=-1, note=", where 0 and -1 keep all tokens")
        _check_count("min_tokens", self.min_tokens, least=0)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_count(name, value, least=-1, note=", where -1 is the full vocabulary")
        if self.seed is not None:
            _check_count("seed", self.seed, least=-(2**63), most=2**64 - 1)
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens, least=1)
            if self.min_tokens > self.max_tokens:
                _refuse(
                    f"min_tokens must be at most max_tokens={self.max_tokens}, "
                    f"got {self.min_tokens}; raise max_tokens or lower min_tokens."
                )

    def _check_numbers(self) -> None:
        _check_number("temperature", self.temperature, 0.0, _MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number(
            "repetition_penalty",
            self.repetition_penalty,
            _LEAST_REPETITION_PENALTY,
            _MAX_REPETITION_PENALTY,
        )
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _check_logit_bias(self) -> None:
        _check_ints("logit_bias", self.logit_bias or ())
        for token_id, bias in (self.logit_bias or {}).items():
            _check_number(f"logit_bias[{token_id}]", bias, -_MAX_LOGIT_BIAS, _MAX_LOGIT_BIAS)

    def _check_stop(self) -> None:
        given: object = self.stop
        if not isinstance(given, str | Sequence | None):
            _refuse(f"stop must be a string or a list of strings, got {given!r}.")
        _check_ints("stop_token_ids", self.stop_token_ids or ())
        for stop in (self.stop,) if isinstance(self.stop, str) else self.stop or ():
            if not isinstance(stop, str) or not stop:
                _refuse(f"stop must hold non-empty strings, got {stop!r}; remove it.")
        if given and not self.detokenize:
            _refuse("stop is found in the text, and detokenize is False; set it to True.")

    def _check_forced(self) -> None:
        forced = self.forced_token_ids
        if forced is None:
            return
        _check_ints("forced_token_ids", forced)
        if not forced:
            _refuse("forced_token_ids must hold at least one token, got none; leave it out.")
        if self.n > 1 or self.stop or self.stop_token_ids:
            _refuse(
                "forced_token_ids fix one completion and its end, "
                "got n > 1, stop or stop_token_ids as well; remove them."
            )
        if self.max_tokens is not None and self.max_tokens < len(forced):
            _refuse(
                f"max_tokens={self.max_tokens} would cut the {len(forced)} forced_token_ids; "
                "set max_tokens to None."
            )

    def _check_structured(self) -> None:
        form = self.structured_outputs
        _check_type("structured_outputs", form, StructuredOutputs, "a StructuredOutputs")
        if form is not None and self.forced_token_ids is not None:
            _refuse(
                "forced_token_ids fix every token, and structured_outputs was given as well; "
                "remove one of them."
            )


def _refuse(message: str) -> None:
    raise InvalidSamplingParamsError(message)


def _check_count(
    name: str, value: int, *, least: int, most: int | None = None, note: str = ""
) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if is_count and value >= least and (most is None or value <= most):
        return
    limit = f"of at least {least}" if most is None else f"from {least} to {most}"
    _refuse(f"{name} must be an integer {limit}{note}, got {value!r}.")


def _check_number(
    name: str, value: float, least: float, most: float, *, open_below: bool = False
) -> None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if is_number and least <= value <= most and not (open_below and value == least):
        return
    lower = "above" if open_below else "of at least"
    _refuse(
        f"{name} must be a finite number {lower} {least:g} and at most {most:g}, got {value!r}."
    )


def _check_type(name: str, value: object, allowed: type | UnionType, words: str) -> None:
    if value is not None and not isinstance(value, allowed):
        _refuse(f"{name} must be {words}, got {value!r}.")


def _check_choice(choice: object) -> None:
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str | bytes)
    texts = list(choice) if isinstance(choice, Sequence) else []
    if not is_list or not texts or not all(isinstance(text, str) for text in texts):
        _refuse(f"choice must be a list of at least one string, got {choice!r}.")


def _check_ints(name: str, token_ids: object) -> None:
    if isinstance(token_ids, Iterable) and all(type(token_id) is int for token_id in token_ids):
        return
    _refuse(f"{name} must hold token ids, which are integers, got {token_ids!r}.")


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            _refuse(
                f"{name} holds token id {token_id}, and this model has ids 0 to "
                f"{vocab_size - 1}; remove it or take the id from this model's tokenizer."
            )
