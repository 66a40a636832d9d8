"""From tokens to text, as the tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tightkv.engine.sampling_params import SamplingParams

__all__ = ["IncrementalDetokenizer", "StopChecker"]

_REPLACEMENT = "\ufffd"

# Text before the first token: metaspace decoders drop the space that begins a text.
_NUM_CONTEXT_TOKENS = 6

# A character has up to four bytes, and a byte may be a token.
_MAX_CHARACTER_TOKENS = 4

# An open character needs few tokens. A longer wait means bytes that never become one.
_MAX_OPEN_TOKENS = 8


class IncrementalDetokenizer:
    """Text of one sequence; what it returns piece by piece adds up to the final text.

    A piece never ends inside a character, nor, where stop strings are asked for and not kept,
    in what may be the beginning of one. The cost per token does not grow with the text.

    A token that ends the sequence (end-of-sequence, stop token) has no place in the text: do not
    append it, unless `include_stop_str_in_output` is set.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self._decoder = (
            _TokenDecoder(tokenizer, prompt_token_ids, params.skip_special_tokens)
            if params.detokenize
            else None
        )
        self._stop = StopChecker(params.stop_strings, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._num_taken = 0

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def take_new_text(self) -> str:
        """The text that has come since the last call."""
        new = self._pieces[self._num_taken :]
        self._num_taken = len(self._pieces)
        return "".join(new)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that has ended the text; None while there is none."""
        return self._stop.matched

    def append(self, token_id: int) -> str:
        """Take the next token.

        Once `stop_reason` is set, the text is final, and further tokens add nothing.

        Returns:
            The text that is certain now and was not before; often one word, may be empty.
        """
        self._num_tokens += 1
        if self._decoder is None or self._stop.matched is not None:
            return ""
        return self._release(self._stop.feed(self._decoder.append(token_id), self._may_stop))

    def finish(self) -> str:
        """End the text.

        Returns:
            What was held back. A character that never became complete is U+FFFD.
        """
        if self._decoder is None or self._stop.matched is not None:
            return ""
        last = self._stop.feed(self._decoder.finish(), self._may_stop)
        return self._release(last + self._stop.flush())

    @property
    def _may_stop(self) -> bool:
        return self._num_tokens > self._min_tokens

    def _release(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


class StopChecker:
    """Finds the first stop string in a text that comes in pieces.

    The first is the one that ends first, and of those the longest: so it does not depend on how
    the text was cut into pieces. One inside the pieces fed with `may_stop=False` is passed over.
    """

    def __init__(self, stop_strings: Sequence[str], include_in_output: bool) -> None:
        self.matched: str | None = None
        self._stop_strings = tuple(stop_strings)
        self._include_in_output = include_in_output
        # The end of the text, as long as a stop string that is not complete yet.
        self._tail = ""
        self._tail_size = max(map(len, self._stop_strings), default=1) - 1
        self._num_held = 0

    def feed(self, piece: str, may_stop: bool) -> str:
        """Take the next piece of text, and return what may be shown of it and before it."""
        text = self._tail + piece
        shown = len(self._tail) - self._num_held
        match = self._first_match(text, len(self._tail)) if may_stop else None
        if match is not None:
            self.matched, end = match
            self._num_held = 0
            return text[shown : end if self._include_in_output else end - len(self.matched)]
        self._num_held = 0 if self._include_in_output else self._num_to_hold(text)
        self._tail = text[max(0, len(text) - self._tail_size) :]
        return text[shown : len(text) - self._num_held]

    def flush(self) -> str:
        """Return what was held back; the text is at its end."""
        held = self._tail[len(self._tail) - self._num_held :]
        self._num_held = 0
        return held

    def _first_match(self, text: str, seen: int) -> tuple[str, int] | None:
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stop_strings
            if (start := text.find(stop, max(0, seen + 1 - len(stop)))) >= 0
        ]
        end, _, stop = min(ends, default=(0, 0, None))
        return None if stop is None else (stop, end)

    def _num_to_hold(self, text: str) -> int:
        for size in range(min(self._tail_size, len(text)), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stop_strings):
                return size
        return 0


class _TokenDecoder:
    """Decodes a window of tokens that begins shortly before the text still open.

    The first tokens of the window are context: `_context_text` has been returned already.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = self._context_of(prompt_token_ids)
        self._num_context = len(self._window)
        self._context_text = self._decode(self._window)

    def append(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        waited_enough = len(self._window) - self._num_context >= _MAX_OPEN_TOKENS
        if text == self._context_text:
            # Special tokens that are skipped, say; a long run of them must not pile up.
            if waited_enough:
                self._window.pop()
            return ""
        is_open = text.endswith(_REPLACEMENT)
        if is_open and not waited_enough:
            return ""
        return self._advance(text, is_open)

    def finish(self) -> str:
        return self._advance(self._decode(self._window), is_open=False)

    def _advance(self, text: str, is_open: bool) -> str:
        """Return the new part of the window's text, up to a last character that is open."""
        opened = self._window[self._num_context :] or self._window
        opened_text = self._decode(opened)
        known = len(self._context_text)
        # Byte-fallback decoders void a whole run of bytes for one that is wrong.
        piece = text[known:] if text.startswith(self._context_text) else opened_text
        self._window, self._num_context = opened, len(opened)
        self._context_text = opened_text.removesuffix(_REPLACEMENT) if is_open else opened_text
        return piece.removesuffix(_REPLACEMENT) if is_open else piece

    def _context_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, begun at a whole character."""
        for size in range(_NUM_CONTEXT_TOKENS, _NUM_CONTEXT_TOKENS + _MAX_CHARACTER_TOKENS):
            context = list(prompt_token_ids[-size:])
            if not self._decode(context).startswith(_REPLACEMENT):
                break
        return context

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)
