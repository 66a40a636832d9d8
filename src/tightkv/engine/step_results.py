"""What a step's logits come to: read where they are on a CPU, in one copy from a device."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from tightkv.engine.batch import Array, ForwardBatch
from tightkv.engine.device_batch import ResultsBuffer
from tightkv.engine.device_sampler import DeviceSampler, FetchedResults, SamplingPlan, ScoredRow
from tightkv.engine.outputs import Logprob
from tightkv.engine.sampler import (
    SampledToken,
    Sampler,
    SamplingState,
    UnusableLogits,
    prompt_logprobs,
)
from tightkv.engine.scheduler import ScheduledChunk
from tightkv.kvcache import KVCacheStorage

__all__ = ["DeviceReader", "HostReader", "LogitsReader", "StepResults", "prompt_positions"]


class StepResults(Protocol):
    """Answers about one step.

    Attributes:
        bad_tokens: bool `[num_tokens]`, a NaN or Inf in K or V.
    """

    bad_tokens: Array

    def prompt_logprobs(
        self, rows: range, following: Seq[int], num_logprobs: int | None
    ) -> list[dict[int, Logprob]] | None:
        """Log-probabilities of a prompt's rows of logits.

        Args:
            rows: of the step.
            following: the prompt's token after each.
            num_logprobs: how many; None: nobody reads them.

        Returns:
            One table per row, none if nobody reads them; None if a row is not finite.
        """

    def sample(
        self, rows: Seq[int], states: Seq[SamplingState]
    ) -> list[SampledToken | UnusableLogits]:
        """Tokens of rows, each row once, recorded in their states."""


class LogitsReader(Protocol):
    """Makes results of logits."""

    def prepare(self, chunks: Seq[ScheduledChunk]) -> tuple[Array, ...]:
        """Before a step: what is to travel with its batch."""

    def read(self, batch: ForwardBatch, logits: torch.Tensor) -> StepResults:
        """After it; the results hold until the next call."""


class HostReader:
    """Computes each answer when it is asked for."""

    def __init__(self) -> None:
        self._sampler = Sampler()

    def prepare(self, chunks: Seq[ScheduledChunk]) -> tuple[Array, ...]:
        return ()

    def read(self, batch: ForwardBatch, logits: torch.Tensor) -> StepResults:
        return _HostResults(batch, logits, self._sampler)


class _HostResults:
    def __init__(self, batch: ForwardBatch, logits: torch.Tensor, sampler: Sampler) -> None:
        self.bad_tokens: Array = batch.metadata.bad_tokens.numpy()
        self._logits = logits
        self._sampler = sampler

    def prompt_logprobs(
        self, rows: range, following: Seq[int], num_logprobs: int | None
    ) -> list[dict[int, Logprob]] | None:
        logits = self._logits[rows.start : rows.stop]
        if not bool(torch.isfinite(logits.amax(-1)).all()):
            return None
        return [] if num_logprobs is None else prompt_logprobs(logits, following, num_logprobs)

    def sample(
        self, rows: Seq[int], states: Seq[SamplingState]
    ) -> list[SampledToken | UnusableLogits]:
        # A step of decodes samples from all rows: no copy of them.
        chosen = self._logits if len(rows) == len(self._logits) else self._logits[list(rows)]
        return self._sampler.sample(chosen, states)


class DeviceReader:
    """Has everything computed on the device, then waits once for all of it."""

    def __init__(
        self, sampler: DeviceSampler, results: ResultsBuffer, storage: KVCacheStorage
    ) -> None:
        """Bind what it uses; the storage's clip counts come along with the results."""
        self._sampler = sampler
        self._results = results
        self._storage = storage
        self._plan: SamplingPlan | None = None

    def prepare(self, chunks: Seq[ScheduledChunk]) -> tuple[Array, ...]:
        sampled: list[tuple[int, SamplingState]] = []
        prompts: list[ScoredRow] = []
        row = 0
        for chunk in chunks:
            sequence = chunk.sequence
            positions = prompt_positions(chunk)
            wanted = sequence.params.prompt_logprobs or 0
            first = row - sequence.num_computed_tokens
            prompts += (
                ScoredRow(first + position, sequence.token_ids[position + 1], wanted)
                for position in positions
            )
            if sequence.needs_prompt_logprobs:
                row += chunk.num_tokens
            elif chunk.completes:
                row += 1
            if chunk.completes:
                sampled.append((row - 1, sequence.sampling))
        self._plan = self._sampler.plan(sampled, prompts)
        return self._plan.arrays

    def read(self, batch: ForwardBatch, logits: torch.Tensor) -> StepResults:
        plan = self._plan
        assert plan is not None, "a step is prepared before it is read"
        tensors = self._sampler.start(plan, batch.sampling, logits)
        bad_tokens, clip_table, *chosen = self._results.fetch(
            [batch.metadata.bad_tokens, self._storage.clip_table, *tensors]
        )
        self._storage.note_clips(clip_table.tolist())
        return FetchedResults(plan, bad_tokens, chosen)


def prompt_positions(chunk: ScheduledChunk) -> range:
    """Positions of a chunk whose log-probabilities are still wanted of the prompt."""
    sequence = chunk.sequence
    if not sequence.needs_prompt_logprobs:
        return range(0)
    begin = sequence.num_computed_tokens
    end = min(begin + chunk.num_tokens, sequence.prompt_len - 1)
    # After a preemption some positions come a second time. Nothing precedes the first token.
    return range(max(begin, len(sequence.prompt_logprobs) - 1), end)
