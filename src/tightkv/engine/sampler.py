"""From logits to tokens, each row by itself.

A row's token depends on its own logits and its own `SamplingState` only, so a batch of N gives
what N runs alone give. Semantics are those of vLLM's V1 sampler.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightkv.engine.grammar import GrammarMatcher
from tightkv.engine.outputs import Logprob
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import EngineError, RequestError, TightKVError

__all__ = [
    "RowTensors",
    "SampledToken",
    "Sampler",
    "SamplingState",
    "UnusableLogits",
    "changed_logits",
    "kept_token_ids",
    "not_finite",
    "prompt_logprobs",
    "settle_row",
]

# Nuclei are small as a rule: sorting this many tokens first saves sorting the vocabulary.
_NUCLEUS_SIZES = (512, 8192)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token of one row.

    Attributes:
        token_id: the chosen, or forced, token.
        logprob: its log-probability; None if neither asked for nor forced.
        top: token id to log-probability, the chosen one first; None if not asked for.
    """

    token_id: int
    logprob: float | None = None
    top: dict[int, Logprob] | None = None


@dataclass(frozen=True, slots=True)
class UnusableLogits:
    """A row that no token can be taken from; its request fails, the others go on.

    Attributes:
        error: a RequestError where the request's own parameters leave nothing to sample.
    """

    error: TightKVError


@dataclass(slots=True)
class SamplingState:
    """What the sampler remembers of one sequence; lives as long as the sequence.

    Preemption leaves it alone: after recomputation the sequence goes on with the same random
    numbers and the same counts.

    Attributes:
        params: what the request asked for.
        generator: on the CPU; gives one number per sampled token.
        prompt_token_ids: int64 [prompt_len].
        ending_token_ids: int64 [n], what may not be sampled before `min_tokens`.
        bias_token_ids: int64 [n], keys of `logit_bias`.
        bias_values: float32 [n], values of `logit_bias`.
        num_output_tokens: tokens sampled so far.
        history: counts for the penalties; None until a penalty needs them.
        grammar: what the text must follow, up to where it has come; None if it is free.
    """

    params: SamplingParams
    generator: torch.Generator
    prompt_token_ids: Tensor
    ending_token_ids: Tensor
    bias_token_ids: Tensor
    bias_values: Tensor
    num_output_tokens: int = 0
    history: _TokenHistory | None = None
    grammar: GrammarMatcher | None = None

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        default_seed: int,
        eos_token_ids: Collection[int] = (),
        *,
        index: int = 0,
        grammar: GrammarMatcher | None = None,
    ) -> SamplingState:
        """Begin a sequence.

        Args:
            params: what the request asked for; its token ids are below the vocabulary size.
            prompt_token_ids: the prompt.
            default_seed: taken if `params.seed` is None; differs from sequence to sequence.
            eos_token_ids: the model's end-of-sequence tokens.
            index: which of the `n` completions; added to the seed, as vLLM does.
            grammar: of `params.structured_outputs`, at its beginning, this sequence's own.
        """
        seed = default_seed if params.seed is None else params.seed
        bias = params.logit_bias or {}
        return cls(
            params=params,
            # torch takes the seed modulo 2**64; the sum may be one more.
            generator=torch.Generator().manual_seed((seed + index) % 2**64),
            prompt_token_ids=_ids(prompt_token_ids),
            ending_token_ids=_ids(_ending_token_ids(params, eos_token_ids)),
            bias_token_ids=_ids(bias),
            bias_values=torch.tensor(list(bias.values()), dtype=torch.float32),
            grammar=grammar,
        )

    @property
    def next_forced_token_id(self) -> int | None:
        """The token to take now; None if tokens are sampled.

        Raises:
            EngineError: if the forced tokens have run out.
        """
        forced = self.params.forced_token_ids
        if forced is None:
            return None
        if self.is_forced_out:
            raise EngineError(
                f"All {len(forced)} forced_token_ids are taken, and one more was asked for; "
                "finish the sequence when SamplingState.is_forced_out."
            )
        return forced[self.num_output_tokens]

    @property
    def is_forced_out(self) -> bool:
        """Whether the sequence is at its end because its forced tokens have run out."""
        forced = self.params.forced_token_ids
        return forced is not None and self.num_output_tokens >= len(forced)

    @property
    def is_below_min_tokens(self) -> bool:
        """Whether the next token may not end the sequence."""
        return self.num_output_tokens < self.params.min_tokens

    @property
    def changes_logits(self) -> bool:
        """Whether bias, a grammar, minimum length or penalties act on the next token."""
        return (
            bool(self.params.logit_bias)
            or self.grammar is not None
            or self.is_below_min_tokens
            or self.params.has_penalties
        )

    @property
    def takes_best(self) -> bool:
        """Whether the next token is that of the highest logit, as the model made it."""
        params = self.params
        return params.is_greedy and params.forced_token_ids is None and not self.changes_logits

    @property
    def is_text_complete(self) -> bool:
        """Whether the sequence is at its end because its grammar lets nothing more follow."""
        return self.grammar is not None and self.grammar.is_finished

    def draw_uniform(self) -> float:
        """The next random number of the sequence, from 0 to below 1."""
        return torch.rand((), dtype=torch.float64, generator=self.generator).item()

    def record(self, token_id: int) -> None:
        """Count a token of the output; the sampler does so for each one it returns."""
        self.num_output_tokens += 1
        if self.history is not None:
            self.history.append(token_id)


@dataclass(frozen=True, slots=True)
class RowTensors:
    """What changes a row of logits, where the row is; None where it does not apply.

    Attributes:
        bias_token_ids: int64 [n].
        bias_values: float32 [n].
        allowed: bool, at least [vocab_size]: what a grammar lets follow.
        ending_token_ids: int64 [n].
        prompt_token_ids: int64 [prompt_len], for the penalties' first token.
    """

    bias_token_ids: Tensor | None
    bias_values: Tensor | None
    allowed: Tensor | None
    ending_token_ids: Tensor | None
    prompt_token_ids: Tensor | None

    @classmethod
    def of(cls, state: SamplingState) -> RowTensors:
        """Those of a sequence, on the CPU."""
        return cls(
            bias_token_ids=state.bias_token_ids if state.params.logit_bias else None,
            bias_values=state.bias_values if state.params.logit_bias else None,
            allowed=None if state.grammar is None else state.grammar.allowed(),
            ending_token_ids=state.ending_token_ids if state.is_below_min_tokens else None,
            prompt_token_ids=state.prompt_token_ids,
        )


class Sampler:
    """Chooses one token per row; what it remembers is in each row's `SamplingState`."""

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, states: Sequence[SamplingState]
    ) -> list[SampledToken | UnusableLogits]:
        """Choose the next token of each sequence, and record it in its state.

        Ties go to the lowest token id. A row that is unusable leaves its state as it was.

        Args:
            logits: float32 [num_rows, vocab_size], as the model made them; not written to.
            states: one per row, each at most once.

        Raises:
            EngineError: if rows and states differ in number, or forced tokens have run out.
        """
        if logits.dim() != 2 or len(logits) != len(states):
            raise EngineError(
                f"Sampling needs logits [{len(states)}, vocab_size] for {len(states)} states, "
                f"got {list(logits.shape)}; pass the last position of each sequence."
            )
        best = _best(logits)
        # NaN counts as the maximum here, too.
        peaks = logits.gather(1, best[:, None])[:, 0].tolist()
        choices = _batch_choices(best, states)
        return [_sample_row(*row) for row in zip(logits, peaks, states, choices, strict=True)]


@torch.inference_mode()
def prompt_logprobs(
    logits: Tensor, next_token_ids: Sequence[int], num_logprobs: int
) -> list[dict[int, Logprob]]:
    """Log-probabilities of the tokens that follow each position of a prompt.

    Args:
        logits: float32 [num_positions, vocab_size], as the model made them.
        next_token_ids: per position, the prompt token after it.
        num_logprobs: most probable tokens to report besides; 0 is none, -1 the vocabulary.

    Returns:
        Per position, token id to log-probability, the prompt's own token first.

    Raises:
        EngineError: if a position's logits are not finite.
    """
    results = []
    for row, token_id in zip(logits, next_token_ids, strict=True):
        peak = row.max().item()
        if not math.isfinite(peak):
            raise EngineError(not_finite(peak))
        results.append(_logprobs(row, peak, token_id, num_logprobs))
    return results


def kept_token_ids(logits: Tensor, *, min_p: float, top_k: int, top_p: float) -> Tensor:
    """Token ids that min_p, top_k and top_p leave, applied in this order.

    Tokens tied with the last of `top_k` are kept, as in vLLM and transformers. `top_p` keeps a
    token if the more probable ones do not reach the sum yet (arXiv:1904.09751).

    Args:
        logits: float32 [vocab_size], at least one of them finite, after temperature.
        min_p: from 0 (off) to 1.
        top_k: 0 or -1 is off.
        top_p: above 0 to 1 (off).

    Returns:
        int64 [num_kept]; at least one.
    """
    floor = _lowest_kept_logit(logits, min_p, top_k)
    if top_p < 1 and floor == -math.inf:
        return _nucleus(logits, top_p)
    token_ids = (logits >= floor).nonzero().flatten()
    return token_ids[_nucleus(logits[token_ids], top_p)] if top_p < 1 else token_ids


@dataclass(slots=True)
class _TokenHistory:
    seen: Tensor  # bool [vocab_size]: in prompt or output
    output_counts: Tensor  # float32 [vocab_size]

    @classmethod
    def create(cls, prompt_token_ids: Tensor, like: Tensor) -> _TokenHistory:
        seen = torch.zeros_like(like, dtype=torch.bool)
        seen.index_fill_(0, prompt_token_ids, True)
        return cls(seen, torch.zeros_like(like))

    def append(self, token_id: int) -> None:
        # Not by assignment, which would send the value to a device and wait.
        self.seen[token_id].fill_(True)
        self.output_counts[token_id].add_(1)

    def penalize(self, logits: Tensor, params: SamplingParams) -> None:
        penalty = params.repetition_penalty
        if penalty != 1:
            penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
            torch.where(self.seen, penalized, logits, out=logits)
        if params.frequency_penalty:
            logits.sub_(self.output_counts, alpha=params.frequency_penalty)
        if params.presence_penalty:
            logits.sub_(self.output_counts.clamp(max=1), alpha=params.presence_penalty)


def _ids(token_ids: Collection[int]) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64)


def _ending_token_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> list[int]:
    return sorted({*(eos_token_ids if params.ends_at_eos else ()), *params.stop_tokens})


def _best(logits: Tensor) -> Tensor:
    """Id of each row's highest logit, of equal ones the lowest; of NaN, if there is one."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    # numpy's takes a tenth of the time of torch's.
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _batch_choices(best: Tensor, states: Sequence[SamplingState]) -> Sequence[int | None]:
    return [
        int(token_id) if state.takes_best else state.next_forced_token_id
        for token_id, state in zip(best.tolist(), states, strict=True)
    ]


def _sample_row(
    row: Tensor, peak: float, state: SamplingState, choice: int | None
) -> SampledToken | UnusableLogits:
    # NaN counts as the maximum, and so no NaN anywhere in the row gets past this.
    if not math.isfinite(peak):
        return UnusableLogits(EngineError(not_finite(peak)))
    if choice is None:
        choice = _choose(row, peak, state)
    settled = settle_row(choice, state)
    if isinstance(settled, UnusableLogits):
        return settled
    return _with_logprobs(row, peak, settled, state.params)


def settle_row(choice: int | None, state: SamplingState) -> int | UnusableLogits:
    """Record the chosen token, None if there was none to choose; it, or why it cannot be had."""
    if choice is None:
        return UnusableLogits(RequestError(_nothing_left(state)))
    if state.grammar is not None and not state.grammar.consume(choice):
        reason = state.grammar.error or "The grammar refuses its own token."
        return UnusableLogits(RequestError(reason))
    state.record(choice)
    return choice


def not_finite(peak: float) -> str:
    """What to say of a row whose largest logit is this."""
    return (
        f"The model gave logits whose maximum is {peak}, where a finite number is needed; "
        "try another dtype or kv_cache_dtype."
    )


def _nothing_left(state: SamplingState) -> str:
    if state.grammar is None:
        return "No token is left to sample: min_tokens rules out every possible one; lower it."
    return state.grammar.error or (
        "No token is left to sample: this model gives none that structured_outputs allow here; "
        "change them."
    )


def _choose(row: Tensor, peak: float, state: SamplingState) -> int | None:
    if state.changes_logits:
        row = changed_logits(row, state, RowTensors.of(state))
        peak = row.max().item()
    if not math.isfinite(peak):
        return None
    return int(row.argmax()) if state.params.is_greedy else _draw(row, peak, state)


def changed_logits(row: Tensor, state: SamplingState, given: RowTensors) -> Tensor:
    """A row after bias, grammar, minimum length and penalties; waits for no device.

    Args:
        row: float32 [vocab_size]; not written to.
        state: of the sequence; its history begins here, with the first penalty.
        given: what applies now.
    """
    row = row.clone()
    if given.bias_token_ids is not None and given.bias_values is not None:
        row[given.bias_token_ids] += given.bias_values
    if given.allowed is not None:
        row.masked_fill_(~given.allowed[: len(row)], -math.inf)
    if given.ending_token_ids is not None:
        _rule_out_endings(row, given.ending_token_ids, state.grammar is not None)
    if state.params.has_penalties:
        if state.history is None and given.prompt_token_ids is not None:
            state.history = _TokenHistory.create(given.prompt_token_ids, like=row)
        if state.history is not None:
            state.history.penalize(row, state.params)
    return row


def _rule_out_endings(row: Tensor, token_ids: Tensor, has_grammar: bool) -> None:
    before = row[token_ids]
    row.index_fill_(0, token_ids, -math.inf)
    if has_grammar:
        # Where the text is complete, nothing else may follow.
        row[token_ids] = torch.where(row.max().isfinite(), -math.inf, before)


def _draw(row: Tensor, peak: float, state: SamplingState) -> int:
    params = state.params
    # With the peak at 0 no temperature can overflow.
    scaled = (row - peak) / params.temperature
    uniform = state.draw_uniform()
    if params.min_p == 0 and params.top_k <= 0 and params.top_p == 1:
        return _inverse_cdf(scaled, uniform)
    kept = kept_token_ids(scaled, min_p=params.min_p, top_k=params.top_k, top_p=params.top_p)
    return int(kept[_inverse_cdf(scaled[kept], uniform)])


def _inverse_cdf(logits: Tensor, uniform: float) -> int:
    cumulative = logits.exp().cumsum(0, dtype=torch.float64)
    # right=True steps over tokens of probability 0; uniform < 1 keeps it inside.
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))


def _lowest_kept_logit(logits: Tensor, min_p: float, top_k: int) -> float:
    # Both keep all from some logit on, so the stricter one decides, in whichever order.
    floor = -math.inf
    if min_p > 0:
        floor = logits.max().item() + math.log(min_p)
    if 0 < top_k < len(logits):
        floor = max(floor, logits.topk(top_k).values[-1].item())
    return floor


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    weights = (logits - logits.max()).exp()
    target = top_p * weights.sum(dtype=torch.float64)
    for num_sorted in (*_NUCLEUS_SIZES, len(logits)):
        order = _descending(logits, num_sorted)
        ordered = weights[order]
        keeps = ordered.cumsum(0, dtype=torch.float64) - ordered < target
        if len(order) == len(logits) or not keeps[-1]:
            break
    return order[keeps]


def _descending(row: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest and of those tied with the last, ties by lowest id."""
    if count >= len(row):
        return row.sort(descending=True, stable=True).indices
    candidates = (row >= row.topk(count).values[-1]).nonzero().flatten()
    return candidates[row[candidates].sort(descending=True, stable=True).indices]


def _with_logprobs(row: Tensor, peak: float, choice: int, params: SamplingParams) -> SampledToken:
    if params.logprobs is None and params.forced_token_ids is None:
        return SampledToken(choice)
    top = _logprobs(row, peak, choice, params.logprobs or 0)
    return SampledToken(choice, top[choice].logprob, None if params.logprobs is None else top)


def _logprobs(row: Tensor, peak: float, token_id: int, num_logprobs: int) -> dict[int, Logprob]:
    log_total = peak + math.log((row - peak).exp().sum(dtype=torch.float64).item())
    logit = row[token_id]
    num_before = (row > logit).count_nonzero() + (row[:token_id] == logit).count_nonzero()
    result = {token_id: Logprob(logit.item() - log_total, 1 + int(num_before))}
    top = _top_token_ids(row, num_logprobs)
    for place, (other, value) in enumerate(zip(top.tolist(), row[top].tolist(), strict=True), 1):
        result[other] = Logprob(value - log_total, place)
    return result


def _top_token_ids(row: Tensor, count: int) -> Tensor:
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=row.device)
    count = len(row) if count == -1 else min(count, len(row))
    return _descending(row, count)[:count]
