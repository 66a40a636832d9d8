"""From logits to the next token of each sequence, and to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from tightkv.engine.batch import ForwardBatch
from tightkv.engine.outputs import Logprob
from tightkv.engine.sampler import SampledToken, Sampler, UnusableLogits, prompt_logprobs
from tightkv.engine.scheduler import ScheduledChunk
from tightkv.engine.sequence import Sequence
from tightkv.errors import EngineError

__all__ = ["LogitsObserver", "OutputProcessor"]

LogitsObserver = Callable[[Sequence, int, torch.Tensor], None]
"""Called with a sequence, a token's position, and the float32 logits `[vocab_size]` after it."""

_NOT_FINITE = (
    "K or V of this request held a NaN or Inf: the model's numbers are broken for this prompt; "
    "send another one, or check the weights."
)


class OutputProcessor:
    """Takes what a forward pass gave and carries each sequence one step on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int]) -> None:
        self.observer: LogitsObserver | None = None
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._sampler = Sampler()
        self._texts: dict[int, str] = {}

    def process(self, batch: ForwardBatch, logits: torch.Tensor) -> None:
        """Note prompt log-probabilities, sample, append, and finish what is at its end.

        Args:
            batch: the step; `num_computed_tokens` of its sequences is advanced here.
            logits: float32 `[num_rows, vocab_size]` of the batch's logit rows.
        """
        bad = batch.metadata.bad_tokens.cpu()
        token, row = 0, 0
        completed: list[tuple[Sequence, int]] = []
        for chunk, num_rows in zip(batch.chunks, batch.rows_per_chunk, strict=True):
            sequence, completes = chunk.sequence, chunk.completes
            if bad[token : token + chunk.num_tokens].any():
                sequence.finish("error", error=EngineError(_NOT_FINITE))
            else:
                self._note_prompt_logprobs(chunk, logits[row : row + num_rows])
                sequence.num_computed_tokens += chunk.num_tokens
                if completes and not sequence.is_finished:
                    completed.append((sequence, row + num_rows - 1))
            token, row = token + chunk.num_tokens, row + num_rows
        self._sample(completed, logits)

    def _sample(self, completed: list[tuple[Sequence, int]], logits: torch.Tensor) -> None:
        if not completed:
            return
        rows = [row for _, row in completed]
        # A step of decodes samples from all rows: no copy of them.
        chosen = logits if len(rows) == len(logits) else logits[rows]
        if self.observer is not None:
            for (sequence, _), row_logits in zip(completed, chosen, strict=True):
                self.observer(sequence, sequence.num_tokens - 1, row_logits)
        sampled = self._sampler.sample(chosen, [sequence.sampling for sequence, _ in completed])
        for (sequence, _), token in zip(completed, sampled, strict=True):
            if isinstance(token, UnusableLogits):
                sequence.finish("error", error=token.error)
            else:
                self._append(sequence, token)

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        sequence.token_ids.append(token.token_id)
        if token.top is not None:
            sequence.logprobs.append(self._with_text(token.top))
        if token.logprob is not None:
            sequence.cumulative_logprob += token.logprob
        if self._ends(sequence, token.token_id):
            stop_reason = None if token.token_id in self._eos_token_ids else token.token_id
            if sequence.params.include_stop_str_in_output:
                sequence.detokenizer.append(token.token_id)
            sequence.finish("stop", stop_reason)
            return
        sequence.detokenizer.append(token.token_id)
        if sequence.detokenizer.stop_reason is not None:
            sequence.finish("stop", sequence.detokenizer.stop_reason)
        elif sequence.sampling.is_text_complete:
            sequence.finish("stop")
        elif sequence.sampling.is_forced_out or sequence.num_output_tokens >= sequence.max_tokens:
            sequence.finish("length")

    def _ends(self, sequence: Sequence, token_id: int) -> bool:
        params = sequence.params
        is_eos = token_id in self._eos_token_ids and params.ends_at_eos
        return is_eos or token_id in params.stop_tokens

    def _note_prompt_logprobs(self, chunk: ScheduledChunk, logits: torch.Tensor) -> None:
        sequence = chunk.sequence
        wanted = sequence.params.prompt_logprobs
        if wanted is None or not sequence.needs_prompt_logprobs:
            return
        noted = sequence.prompt_logprobs
        if not noted:
            noted.append(None)  # nothing precedes the first token
        begin = sequence.num_computed_tokens
        end = min(begin + chunk.num_tokens, sequence.prompt_len - 1)
        # After a preemption some positions come a second time.
        first = max(begin, len(noted) - 1)
        if first >= end:
            return
        following = sequence.token_ids[first + 1 : end + 1]
        rows = logits[first - begin : end - begin]
        if not bool(torch.isfinite(rows.amax(-1)).all()):
            error = EngineError("The model's logits for this prompt are not finite.")
            sequence.finish("error", error=error)
        elif self.observer is None:
            noted += [self._with_text(top) for top in prompt_logprobs(rows, following, wanted)]
        else:
            for offset, row in enumerate(rows):
                self.observer(sequence, first + offset, row)
            noted += [None] * len(rows)

    def _text_of(self, token_id: int) -> str:
        # The full vocabulary may be asked for at each position: a token is decoded once.
        if token_id not in self._texts:
            self._texts[token_id] = str(self._tokenizer.decode([token_id]))
        return self._texts[token_id]

    def _with_text(self, top: dict[int, Logprob]) -> dict[int, Logprob]:
        return {
            token_id: replace(logprob, decoded_token=self._text_of(token_id))
            for token_id, logprob in top.items()
        }
