"""From logits to the next token of each sequence, and to its end."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from tightkv.engine.batch import Array, ForwardBatch
from tightkv.engine.outputs import Logprob
from tightkv.engine.sampler import SampledToken, UnusableLogits
from tightkv.engine.scheduler import ScheduledChunk
from tightkv.engine.sequence import Sequence
from tightkv.engine.step_results import HostReader, LogitsReader, StepResults, prompt_positions
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

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: frozenset[int],
        reader: LogitsReader | None = None,
    ) -> None:
        """Bind the model's words; `reader` is that of a CPU unless another is given."""
        self.observer: LogitsObserver | None = None
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._reader = reader or HostReader()
        self._texts: dict[int, str] = {}

    def prepare(self, chunks: Seq[ScheduledChunk]) -> tuple[Array, ...]:
        """What is to travel with a step's batch, for `process`."""
        return self._reader.prepare(chunks)

    def process(self, batch: ForwardBatch, logits: torch.Tensor) -> None:
        """Note prompt log-probabilities, sample, append, and finish what is at its end.

        Args:
            batch: the step; `num_computed_tokens` of its sequences is advanced here.
            logits: float32 `[num_rows, vocab_size]` of the batch's logit rows.
        """
        results = self._reader.read(batch, logits)
        if self.observer is not None and batch.bucket:
            logits = logits.clone()  # an observer may keep rows; the next step writes over them
        token, row = 0, 0
        completed: list[tuple[Sequence, int]] = []
        for chunk, num_rows in zip(batch.chunks, batch.rows_per_chunk, strict=True):
            sequence, completes = chunk.sequence, chunk.completes
            if results.bad_tokens[token : token + chunk.num_tokens].any():
                sequence.finish("error", error=EngineError(_NOT_FINITE))
            else:
                self._note_prompt_logprobs(chunk, row, results, logits)
                sequence.num_computed_tokens += chunk.num_tokens
                if completes and not sequence.is_finished:
                    completed.append((sequence, row + num_rows - 1))
            token, row = token + chunk.num_tokens, row + num_rows
        self._sample(completed, results, logits)

    def _sample(
        self, completed: list[tuple[Sequence, int]], results: StepResults, logits: torch.Tensor
    ) -> None:
        if not completed:
            return
        if self.observer is not None:
            for sequence, row in completed:
                self.observer(sequence, sequence.num_tokens - 1, logits[row])
        sampled = results.sample(
            [row for _, row in completed], [sequence.sampling for sequence, _ in completed]
        )
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

    def _note_prompt_logprobs(
        self, chunk: ScheduledChunk, first_row: int, results: StepResults, logits: torch.Tensor
    ) -> None:
        sequence = chunk.sequence
        positions = prompt_positions(chunk)
        noted = sequence.prompt_logprobs
        if sequence.needs_prompt_logprobs and not noted:
            noted.append(None)  # nothing precedes the first token
        if not positions:
            return
        offset = first_row - sequence.num_computed_tokens
        rows = range(positions.start + offset, positions.stop + offset)
        following = sequence.token_ids[positions.start + 1 : positions.stop + 1]
        wanted = None if self.observer else sequence.params.prompt_logprobs
        tables = results.prompt_logprobs(rows, following, wanted)
        if tables is None:
            error = EngineError("The model's logits for this prompt are not finite.")
            sequence.finish("error", error=error)
        elif self.observer is None:
            noted += map(self._with_text, tables)
        else:
            for position, row in zip(positions, rows, strict=True):
                self.observer(sequence, position, logits[row])
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
