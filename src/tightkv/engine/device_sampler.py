"""Sampling on a device: the same tokens as `sampler`, with nothing to wait for but the results.

What the host knows of a step's rows is sent along with its batch, random numbers too: they come
from the same generators as on a CPU. So the choice itself needs no answer from the device, and one
copy brings back tokens, log-probabilities, and what was wrong with a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from tightkv.engine.batch import Array
from tightkv.engine.device_batch import StagingBuffer
from tightkv.engine.outputs import Logprob
from tightkv.engine.sampler import (
    RowTensors,
    SampledToken,
    SamplingState,
    UnusableLogits,
    changed_logits,
    not_finite,
    settle_row,
)
from tightkv.errors import EngineError

__all__ = ["DeviceSampler", "FetchedResults", "SamplingPlan", "ScoredRow"]

_PIECE = 2**23
"""Logits that are sorted and summed at once, so that a large batch needs no large memory."""

_SAMPLED = -1  # the place of a token that is not known before the step


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row of logits whose log-probabilities are wanted.

    Attributes:
        row: of the step's logits.
        token_id: the token to score first; `_SAMPLED`: the one that is sampled.
        num_logprobs: most probable tokens besides; -1 is the vocabulary.
        place: which of the sampled rows it is; 0 if it is none.
    """

    row: int
    token_id: int
    num_logprobs: int
    place: int = 0


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What is to be made of a step's logits.

    Attributes:
        rows: of the logits, one per state.
        states: of the sequences that get a token.
        scored: rows with log-probabilities: first the sampled ones that want some, in order.
        draws: whether some token is drawn, and not the best or a forced one.
        filters: whether top_k, top_p or min_p act on some row.
        arrays: to be sent along with the batch; none if the best token of each row is wanted.
        changed: rows (of `rows`) that bias, grammar, minimum length or penalties change.
        extras: what these need, to be sent in a copy of its own.
    """

    rows: tuple[int, ...]
    states: tuple[SamplingState, ...]
    scored: tuple[ScoredRow, ...]
    draws: bool
    filters: bool
    arrays: tuple[Array, ...]
    changed: tuple[int, ...] = ()
    extras: tuple[Array, ...] = ()

    @property
    def num_tops(self) -> int:
        """The most probable tokens that a row asks for; -1 is the vocabulary."""
        asked = [row.num_logprobs for row in self.scored]
        return -1 if -1 in asked else max(asked, default=0)


class FetchedResults:
    """A step's results on the host; see `step_results.StepResults`."""

    def __init__(self, plan: SamplingPlan, bad_tokens: Array, chosen: Sequence[Array]) -> None:
        self.bad_tokens = bad_tokens
        self._plan = plan
        self._tokens, self._peaks, self._changed_peaks, *self._scores = chosen
        self._places = {row: place for place, row in enumerate(plan.rows)}
        self._scored_places = {
            (of.row, of.token_id == _SAMPLED): place for place, of in enumerate(plan.scored)
        }

    def prompt_logprobs(
        self, rows: range, following: Sequence[int], num_logprobs: int | None
    ) -> list[dict[int, Logprob]] | None:
        places = [self._scored_places[row, False] for row in rows]
        if not all(math.isfinite(self._scores[0][place]) for place in places):
            return None
        if num_logprobs is None:
            return []
        return list(map(self._logprobs, places, following))

    def sample(
        self, rows: Sequence[int], states: Sequence[SamplingState]
    ) -> list[SampledToken | UnusableLogits]:
        return list(map(self._sample_row, rows, states))

    def _sample_row(self, row: int, state: SamplingState) -> SampledToken | UnusableLogits:
        place, params = self._places[row], state.params
        peak = float(self._peaks[place])
        if not math.isfinite(peak):
            return UnusableLogits(EngineError(not_finite(peak)))
        is_open = math.isfinite(self._changed_peaks[place])
        token_id = settle_row(int(self._tokens[place]) if is_open else None, state)
        if isinstance(token_id, UnusableLogits):
            return token_id
        if not _is_scored(state):
            return SampledToken(token_id)
        top = self._logprobs(self._scored_places[row, True], token_id)
        return SampledToken(
            token_id, top[token_id].logprob, None if params.logprobs is None else top
        )

    def _logprobs(self, place: int, token_id: int) -> dict[int, Logprob]:
        peaks, sums, logits, ranks, top_ids, top_values = self._scores
        log_total = float(peaks[place]) + math.log(float(sums[place]))
        result = {token_id: Logprob(float(logits[place]) - log_total, 1 + int(ranks[place]))}
        wanted = self._plan.scored[place].num_logprobs
        count = top_ids.shape[1] if wanted == -1 else wanted
        top = zip(top_ids[place, :count].tolist(), top_values[place, :count].tolist(), strict=True)
        for rank, (other, value) in enumerate(top, 1):
            result[other] = Logprob(value - log_total, rank)
        return result


class DeviceSampler:
    """Makes a plan of a step's rows before it runs, and tensors of results when it has."""

    def __init__(self, device: torch.device, extras: StagingBuffer) -> None:
        """Bind the memory.

        Args:
            device: of the logits.
            extras: takes what only some requests need: masks, biases, tokens of a prompt.
        """
        self._device = device
        self._extras = extras

    def plan(
        self, sampled: Sequence[tuple[int, SamplingState]], prompts: Sequence[ScoredRow] = ()
    ) -> SamplingPlan:
        """What is to be made of the logits; draws the random numbers.

        Args:
            sampled: rows of the logits from which a token is taken, and their states.
            prompts: rows of prompts to be scored.
        """
        rows = tuple(row for row, _ in sampled)
        states = tuple(state for _, state in sampled)
        scored = [
            ScoredRow(row, _SAMPLED, state.params.logprobs or 0, place)
            for place, (row, state) in enumerate(sampled)
            if _is_scored(state)
        ]
        scored += prompts
        forced = [state.next_forced_token_id for state in states]
        drawn = [
            token is None and not state.params.is_greedy
            for state, token in zip(states, forced, strict=True)
        ]
        changed = tuple(
            place
            for place, state in enumerate(states)
            if forced[place] is None and state.changes_logits
        )
        is_plain = rows == tuple(range(len(rows))) and all(state.takes_best for state in states)
        arrays: tuple[Array, ...] = ()
        if not is_plain or scored:
            arrays = (
                numpy.array(
                    [
                        rows,
                        [_SAMPLED if token is None else token for token in forced],
                        [state.params.top_k for state in states],
                    ],
                    numpy.int64,
                ).reshape(3, len(rows)),
                numpy.array(
                    [_numbers(*pair) for pair in zip(states, drawn, strict=True)], numpy.float64
                ).reshape(len(rows), 4),
                numpy.array(
                    [(of.row, of.token_id, of.place) for of in scored], numpy.int64
                ).reshape(len(scored), 3),
            )
        drawing = [state.params for state, draws in zip(states, drawn, strict=True) if draws]
        return SamplingPlan(
            rows=rows,
            states=states,
            scored=tuple(scored),
            draws=bool(drawing),
            filters=any(p.min_p > 0 or p.top_k > 0 or p.top_p < 1 for p in drawing),
            arrays=arrays,
            changed=changed,
            extras=tuple(array for place in changed for array in _extras_of(states[place])),
        )

    @torch.inference_mode()
    def start(self, plan: SamplingPlan, given: Sequence[Tensor], logits: Tensor) -> list[Tensor]:
        """Choose and score, without waiting; what `FetchedResults` is made of.

        Args:
            plan: of this step.
            given: the plan's arrays, on the device.
            logits: float32 `[num_rows, vocab_size]`, as the model made them; not written to.
        """
        if not given:
            best = logits[: len(plan.rows)].argmax(-1)
            peaks = logits.gather(1, best[:, None])[:, 0]  # NaN counts as the maximum, too
            return [best, peaks, peaks]
        integers, numbers, scored = given
        rows, forced, top_k = integers
        changed = self._changes(plan)
        size = max(1, _PIECE // logits.shape[1])
        results = []
        for begin in range(0, len(plan.rows), size):
            part = slice(begin, begin + size)
            chosen = logits[rows[part]]
            peaks = chosen.amax(-1)
            for place, tensors in changed:
                if begin <= place < begin + size:
                    row = changed_logits(chosen[place - begin], plan.states[place], tensors)
                    chosen[place - begin].copy_(row)
            best = chosen.argmax(-1)
            changed_peaks = chosen.gather(1, best[:, None])
            tokens = best
            if plan.draws:
                scaled = (chosen - changed_peaks) / numbers[part, :1].float()
                drawn = _draw(scaled, numbers[part], top_k[part], plan.filters)
                tokens = torch.where(numbers[part, 3] < 0, best, drawn)
            tokens = torch.where(forced[part] >= 0, forced[part], tokens)
            results.append((tokens, peaks, changed_peaks[:, 0]))
        chosen_rows = [torch.cat(tensors) for tensors in zip(*results, strict=True)]
        tokens = chosen_rows[0] if chosen_rows else forced
        scores = _score(plan, scored, tokens, logits) if plan.scored else []
        return [*(chosen_rows or [forced, forced, forced]), *scores]

    def _changes(self, plan: SamplingPlan) -> list[tuple[int, RowTensors]]:
        if not plan.changed:
            return []
        tensors = iter(self._extras.place(plan.extras))
        return [
            (place, _row_tensors(plan.states[place], tensors, self._device))
            for place in plan.changed
        ]


def _is_scored(state: SamplingState) -> bool:
    return state.params.logprobs is not None or state.params.forced_token_ids is not None


def _numbers(state: SamplingState, draws: bool) -> tuple[float, float, float, float]:
    """Temperature, the logit below the peak that min_p keeps, top_p, and a number of [0, 1)."""
    params = state.params
    if not draws:
        return 1.0, -math.inf, 1.0, -1.0
    floor = math.log(params.min_p) if params.min_p > 0 else -math.inf
    return params.temperature, floor, params.top_p, state.draw_uniform()


def _extras_of(state: SamplingState) -> Iterator[Array]:
    """What `_row_tensors` reads, in its order."""
    if state.params.logit_bias:
        yield state.bias_token_ids.numpy()
        yield state.bias_values.numpy()
    if state.grammar is not None:
        yield numpy.packbits(state.grammar.allowed().numpy(), bitorder="little")
    if state.is_below_min_tokens:
        yield state.ending_token_ids.numpy()
    if state.params.has_penalties and state.history is None:
        yield state.prompt_token_ids.numpy()


def _row_tensors(
    state: SamplingState, tensors: Iterator[Tensor], device: torch.device
) -> RowTensors:
    has_bias = bool(state.params.logit_bias)
    return RowTensors(
        bias_token_ids=next(tensors) if has_bias else None,
        bias_values=next(tensors) if has_bias else None,
        allowed=_unpacked(next(tensors), device) if state.grammar is not None else None,
        ending_token_ids=next(tensors) if state.is_below_min_tokens else None,
        prompt_token_ids=(
            next(tensors) if state.params.has_penalties and state.history is None else None
        ),
    )


def _unpacked(bits: Tensor, device: torch.device) -> Tensor:
    """Eight flags of each byte, the lowest bit first."""
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return ((bits[:, None] >> places) & 1).flatten().bool()


def _draw(scaled: Tensor, numbers: Tensor, top_k: Tensor, filters: bool) -> Tensor:
    """As `sampler._draw`, of many rows: `[num_rows, vocab_size]` to token ids."""
    _, min_p_floor, top_p, uniform = numbers[:, :, None].unbind(1)
    if not filters:
        return _inverse_cdf(scaled.exp(), uniform)
    ordered, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    last = (top_k - 1).clamp(0, scaled.shape[1] - 1)
    lowest = torch.where(top_k[:, None] > 0, ordered.gather(1, last[:, None]), -math.inf)
    floor = torch.maximum(lowest, min_p_floor.float())
    weights = torch.where(ordered >= floor, ordered.exp(), 0.0)
    target = top_p * weights.sum(-1, keepdim=True, dtype=torch.float64)
    is_kept = weights.cumsum(-1, dtype=torch.float64) - weights < target
    has_nucleus = top_p < 1
    # A nucleus is drawn from in the order of its logits, all else in that of the vocabulary.
    weights = torch.where(
        has_nucleus,
        torch.where(is_kept, weights, 0.0),
        torch.where(scaled >= floor, scaled.exp(), 0.0),
    )
    place = _inverse_cdf(weights, uniform)[:, None]
    return torch.where(has_nucleus, token_ids.gather(1, place), place)[:, 0]


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # right=True steps over weights of 0. Rows that are not finite give any token.
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return place[:, 0].clamp(max=weights.shape[1] - 1)


def _score(plan: SamplingPlan, scored: Tensor, tokens: Tensor, logits: Tensor) -> list[Tensor]:
    """Per scored row: peak, sum of weights, the token's logit, how many are before it, the top."""
    rows, token_ids, places = scored.unbind(1)
    if plan.rows:
        token_ids = torch.where(token_ids >= 0, token_ids, tokens[places])
    vocab_size = logits.shape[1]
    num_tops = vocab_size if plan.num_tops == -1 else min(plan.num_tops, vocab_size)
    vocabulary = torch.arange(vocab_size, device=logits.device)
    results = []
    size = max(1, _PIECE // vocab_size)
    for begin in range(0, len(plan.scored), size):
        part = slice(begin, begin + size)
        chosen, ids = logits[rows[part]], token_ids[part, None]
        peaks = chosen.amax(-1, keepdim=True)
        logit = chosen.gather(1, ids)
        is_before = (chosen > logit) | ((chosen == logit) & (vocabulary < ids))
        tops = chosen[:, :0].sort() if num_tops == 0 else chosen.sort(descending=True, stable=True)
        results.append(
            (
                peaks[:, 0],
                (chosen - peaks).exp().sum(-1, dtype=torch.float64),
                logit[:, 0],
                is_before.sum(-1),
                tops.indices[:, :num_tops],
                tops.values[:, :num_tops],
            )
        )
    return [torch.cat(tensors) for tensors in zip(*results, strict=True)]
