"""Constrained decoding: which tokens may come next, so that the text follows a form.

Schemas, regular expressions and grammars are llguidance's; this module feeds it the tokenizer,
keeps what is compiled, and turns its complaints into ours.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tightkv.engine.sampling_params import StructuredOutputs
from tightkv.errors import InvalidSamplingParamsError
from tightkv.models import one_line

__all__ = ["GrammarCompiler", "GrammarMatcher", "json_rule"]

# One space, or a new line and its indentation: a model without an idea must not fill its
# max_tokens with blanks.
_WHITESPACE = r"( |\n[ \t]{0,32})?"

_MAX_KEPT = 32
_MAX_REASON = 300


class GrammarMatcher:
    """How far one sequence has come in its grammar; lives as long as the sequence."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None while it can."""
        if not self._matcher.is_error():
            return None
        return (
            f"The grammar of structured_outputs failed ({_reason(self._matcher)}): "
            "simplify it, or lower max_tokens."
        )

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete, and only an end-of-sequence token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> Tensor:
        """Which tokens may come next.

        End-of-sequence is one of them exactly where the text so far is complete.

        Returns:
            bool [vocab_size] on the CPU; none is allowed after an error.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits).bool()

    def consume(self, token_id: int) -> bool:
        """Go on by one token; False if it does not fit, and `error` says so."""
        return self._matcher.consume_token(token_id)


class GrammarCompiler:
    """Makes the matchers of one model's requests.

    Any thread may use it: what takes long is done outside its locks, and kept. So a server
    compiles a request's grammar in a thread of its own, and the engine's thread finds it done.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        """Note the model; its vocabulary is read when the first grammar needs it.

        Args:
            tokenizer: of the kind that the library `tokenizers` runs.
            vocab_size: width of the logits; may be more than the tokenizer has.
            eos_token_ids: each of them may end a text; if empty, the tokenizer's own may.
        """
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compiled_lock = threading.Lock()

    def compile(self, form: StructuredOutputs) -> GrammarMatcher:
        """A matcher at the beginning of its text.

        Raises:
            InvalidSamplingParamsError: for a schema, expression or grammar that is wrong, too
                large or not served, and for a model whose tokenizer is of another kind.
        """
        try:
            source = _source(form)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(one_line(error)) from error
        with self._compiled_lock:
            compiled = self._compiled.get(source)
        if compiled is None:
            compiled = self._new_matcher(source)
        with self._compiled_lock:
            self._compiled[source] = compiled
            self._compiled.move_to_end(source)
            if len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
            return GrammarMatcher(compiled.deep_copy(), self._vocab_size)

    def _new_matcher(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self._ready_tokenizer(), source, log_level=0, limits=_limits())
        # The first mask is the slowest by far, and copies share what it takes. A grammar that
        # has no text at all, or none of this model's tokens to begin it, is found out here, too.
        has_beginning = bool(GrammarMatcher(matcher, self._vocab_size).allowed().any())
        if matcher.is_error():
            raise _refusal(_reason(matcher))
        if not has_beginning:
            raise _refusal("no token of this model begins such a text")
        return matcher

    def _ready_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_vocabulary()
            return self._tokenizer

    def _read_vocabulary(self) -> LLTokenizer:
        untyped: Any = self._hf_tokenizer
        try:
            return from_tokenizer(
                untyped,
                n_vocab=max(self._vocab_size, len(untyped)),
                eos_token=self._eos_token_ids or None,
            )
        except ValueError as error:
            raise InvalidSamplingParamsError(
                f"structured_outputs cannot be served with this model's tokenizer "
                f"({one_line(error)}): leave them out."
            ) from error


def json_rule(schema: Mapping[str, object]) -> str:
    """A JSON schema as the right side of a rule of a Lark grammar.

    Raises:
        InvalidSamplingParamsError: if the schema is not JSON.
    """
    try:
        return f"%json {json.dumps(_with_bounded_whitespace(schema))}"
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(one_line(error)) from error


def _source(form: StructuredOutputs) -> str:
    """What llguidance compiles.

    Raises:
        TypeError, ValueError, RecursionError: for a schema that is not JSON.
    """
    if form.grammar is not None:
        return LLMatcher.grammar_from_lark(form.grammar)
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
        return LLMatcher.grammar_from_lark(f"start: {alternatives}")
    schema = {"type": "object"} if form.json is None else form.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        raise TypeError(f"a JSON schema is an object, got {schema!r}")
    return LLMatcher.grammar_from_json_schema(json.dumps(_with_bounded_whitespace(schema)))


def _with_bounded_whitespace(schema: Mapping[str, object]) -> dict[str, object]:
    own = schema.get("x-guidance")
    options = own if isinstance(own, Mapping) else {}
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE, **options}}


def _limits() -> LLParserLimits:
    # Verbose errors would bring the text so far into messages, and so into logs.
    return LLParserLimits(verbose_errors=False)


def _reason(matcher: LLMatcher) -> str:
    text = " ".join(matcher.get_error().split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}…"


def _refusal(reason: str) -> InvalidSamplingParamsError:
    return InvalidSamplingParamsError(
        f"structured_outputs cannot be followed ({reason}): "
        "correct the schema, regular expression or grammar."
    )
