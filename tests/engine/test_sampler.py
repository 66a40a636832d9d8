from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tightkv.engine.sampler import (
    SampledToken,
    Sampler,
    SamplingState,
    UnusableLogits,
    kept_token_ids,
    prompt_logprobs,
)
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import EngineError

EOS = 3
NO_IDS: Any = torch.zeros(1, 0, dtype=torch.int64)


def _state(*, prompt: Sequence[int] = (1, 2), seed: int = 0, **options: Any) -> SamplingState:
    options = {"max_tokens": None, **options}
    return SamplingState.create(SamplingParams(**options), prompt, seed, [EOS])


def _logits(rows: int, vocab_size: int, *, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def _one(logits: Tensor, state: SamplingState) -> SampledToken:
    (result,) = Sampler().sample(logits.reshape(1, -1), [state])
    assert isinstance(result, SampledToken)
    return result


def _uniforms(seed: int, count: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return [float(torch.rand((), dtype=torch.float64, generator=generator)) for _ in range(count)]


def _invert(logits: Tensor, uniform: float) -> int:
    """The token at which the summed probability, in id order, passes `uniform`."""
    total = 0.0
    probabilities = logits.double().softmax(-1).tolist()
    for token_id, probability in enumerate(probabilities):
        total += probability
        if total > uniform:
            return token_id
    raise AssertionError(f"{uniform} is beyond the sum {total}")


def _chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


class TestFilters:
    @pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
    @pytest.mark.parametrize(
        ("min_p", "top_k", "top_p"),
        [
            (0.0, 0, 0.1),
            (0.0, 0, 0.9),
            (0.0, 0, 0.9999),
            (0.0, 1, 1.0),
            (0.0, 50, 1.0),
            (0.0, 5000, 1.0),
            (0.05, 0, 1.0),
            (1.0, 0, 1.0),
            (0.02, 20, 0.8),
            (0.3, 600, 0.99),
        ],
    )
    def test_what_is_kept_is_what_transformers_keeps(
        self, spread: float, min_p: float, top_k: int, top_p: float
    ) -> None:
        for seed in range(5):
            logits = _logits(1, 2000, seed=seed, spread=spread)
            expected = MinPLogitsWarper(min_p)(NO_IDS, logits)
            if top_k:
                expected = TopKLogitsWarper(top_k)(NO_IDS, expected)
            expected = TopPLogitsWarper(top_p)(NO_IDS, expected)
            kept = kept_token_ids(logits[0], min_p=min_p, top_k=top_k, top_p=top_p)
            assert sorted(kept.tolist()) == expected[0].isfinite().nonzero().flatten().tolist()

    def test_top_k_keeps_ties_and_top_p_prefers_the_lower_id(self) -> None:
        logits = torch.tensor([0.0, 1.0, 1.0, 2.0, 1.0])
        assert sorted(kept_token_ids(logits, min_p=0, top_k=2, top_p=1).tolist()) == [1, 2, 3, 4]
        even = torch.zeros(1000)
        kept = kept_token_ids(even, min_p=0, top_k=0, top_p=0.25)
        assert kept.tolist() == list(range(250))

    @pytest.mark.parametrize("top_p", [0.001, 0.1, 0.3, 0.6, 0.99])
    def test_nucleus_of_any_size(self, top_p: float) -> None:
        logits = _logits(1, 20_000, spread=0.5)[0]
        probabilities = logits.double().softmax(-1).tolist()
        expected, total = [], 0.0
        for token_id in sorted(range(20_000), key=lambda i: (-probabilities[i], i)):
            if total >= top_p:
                break
            expected.append(token_id)
            total += probabilities[token_id]
        assert kept_token_ids(logits, min_p=0, top_k=0, top_p=top_p).tolist() == expected

    def test_top_p_keeps_at_least_one(self) -> None:
        logits = _logits(1, 100)[0]
        kept = kept_token_ids(logits, min_p=0, top_k=0, top_p=1e-9)
        assert kept.tolist() == [int(logits.argmax())]


class TestDistribution:
    def test_draws_follow_the_tempered_softmax(self) -> None:
        logits, temperature = _logits(1, 8, seed=1, spread=1.0)[0], 0.7
        state = _state(temperature=temperature, seed=11)
        draws = torch.tensor([_one(logits, state).token_id for _ in range(5000)])
        counts = draws.bincount(minlength=8)
        # 99.9% bound at 7 degrees of freedom; a wrong temperature is far beyond it.
        assert _chi_square(counts, (logits / temperature).softmax(-1)) < 24.3
        assert _chi_square(counts, logits.softmax(-1)) > 100

    def test_neighbouring_seeds_are_independent_draws(self) -> None:
        logits = torch.tensor([0.0, 0.5, 1.0, 1.5])
        states = [
            SamplingState.create(SamplingParams(seed=5), [1], 0, index=index)
            for index in range(4000)
        ]
        results = Sampler().sample(logits.expand(4000, 4), states)
        draws = torch.tensor([r.token_id for r in results if isinstance(r, SampledToken)])
        assert _chi_square(draws.bincount(minlength=4), logits.softmax(-1)) < 16.3

    def test_draws_with_filters_follow_what_is_kept(self) -> None:
        logits = torch.tensor([0.0, 1.0, 2.0, 1.5, -1.0])
        state = _state(top_k=4, top_p=0.9, seed=2)
        draws = torch.tensor([_one(logits, state).token_id for _ in range(3000)])
        kept = torch.tensor([-math.inf, 1.0, 2.0, 1.5, -math.inf]).softmax(-1)
        counts = draws.bincount(minlength=5)
        assert counts[0] == counts[4] == 0
        assert _chi_square(counts[1:4], kept[1:4]) < 13.8

    def test_impossible_tokens_are_never_drawn(self) -> None:
        logits = torch.full((6,), -math.inf)
        logits[[1, 4]] = 0.0
        state = _state()
        assert {_one(logits, state).token_id for _ in range(200)} == {1, 4}

    def test_impossible_token_is_not_drawn_by_the_number_zero(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        monkeypatch.setattr(torch, "rand", lambda *_, **__: zero)
        assert _one(torch.tensor([-math.inf, 0.0, 0.0]), _state()).token_id == 1

    def test_tiny_temperature_does_not_overflow(self) -> None:
        assert _one(torch.tensor([1e30, 2e30, -1e30]), _state(temperature=1e-5)).token_id == 1


class TestPenalties:
    @pytest.mark.parametrize("penalty", [0.6, 1.3, 5.0])
    def test_repetition_penalty_is_that_of_transformers(self, penalty: float) -> None:
        prompt, seed, steps = [4, 4, 7, 19], 3, 150
        state = _state(prompt=prompt, repetition_penalty=penalty, seed=seed)
        process = RepetitionPenaltyLogitsProcessor(penalty)
        ids = list(prompt)
        for step, uniform in enumerate(_uniforms(seed, steps)):
            logits = _logits(1, 20, seed=step, spread=2.0)
            expected = _invert(process(torch.tensor([ids]), logits)[0], uniform)
            assert _one(logits, state).token_id == expected
            ids.append(expected)

    def test_presence_and_frequency_count_the_output_alone(self) -> None:
        seed, steps = 4, 150
        state = _state(prompt=[0, 1, 2], presence_penalty=0.7, frequency_penalty=-0.2, seed=seed)
        counts = [0] * 12
        for step, uniform in enumerate(_uniforms(seed, steps)):
            logits = _logits(1, 12, seed=step, spread=1.0)[0]
            penalty = [0.7 * (count > 0) - 0.2 * count for count in counts]
            expected = _invert(logits - torch.tensor(penalty), uniform)
            assert _one(logits, state).token_id == expected
            counts[expected] += 1

    def test_repetition_comes_before_presence(self) -> None:
        state = _state(temperature=0, repetition_penalty=2.0, presence_penalty=1.0)
        logits = torch.tensor([0.0, 0.0, 0.0, 0.0, 4.0, 1.25])
        # 4 / 2 - 1 = 1 is below 1.25; (4 - 1) / 2 would be above.
        assert [_one(logits, state).token_id for _ in range(2)] == [4, 5]


class TestGreedy:
    @pytest.mark.parametrize("other", [{}, {"temperature": 1.0}])
    def test_ties_go_to_the_lowest_id(self, other: dict[str, Any]) -> None:
        logits = torch.zeros(2, 50_000)
        logits[:, [7, 900, 40_000]] = 1.0
        states = [_state(temperature=0), _state(**{"temperature": 0, **other})]
        first, _ = Sampler().sample(logits, states)
        assert first == SampledToken(7)

    def test_ties_go_to_the_lowest_id_after_a_bias(self) -> None:
        logits = torch.tensor([0.0, 0.0, 3.0, 1.0, 3.0])
        assert _one(logits, _state(temperature=0, logit_bias={0: 3.0})).token_id == 0

    def test_bias_moves_the_choice_and_not_the_logprob(self) -> None:
        logits = torch.tensor([0.0, 1.0, 2.0])
        token = _one(logits, _state(temperature=0, logit_bias={0: 2.5}, logprobs=0))
        assert token.token_id == 0
        assert token.logprob == pytest.approx(float(logits.log_softmax(-1)[0]))

    def test_logits_are_not_written_to(self) -> None:
        logits = _logits(2, 30)
        before = logits.clone()
        states = [
            _state(repetition_penalty=2.0, min_tokens=2, logit_bias={1: 1.0}),
            _state(temperature=0.5, top_p=0.5, top_k=3, min_p=0.1, presence_penalty=1),
        ]
        for _ in range(3):
            Sampler().sample(logits, states)
        assert torch.equal(logits, before)


class TestMinTokens:
    def test_nothing_ends_the_sequence_before(self) -> None:
        logits = torch.tensor([0.0, 1.0, 5.0, 9.0, 2.0])
        state = _state(temperature=0, min_tokens=2, stop_token_ids=[2])
        assert [_one(logits, state).token_id for _ in range(3)] == [4, 4, EOS]

    def test_ignored_end_of_sequence_is_a_token_like_others(self) -> None:
        logits = torch.tensor([0.0, 1.0, 5.0, 9.0, 2.0])
        state = _state(temperature=0, min_tokens=2, stop_token_ids=[2], ignore_eos=True)
        assert _one(logits, state).token_id == EOS

    def test_nothing_left_is_said(self) -> None:
        logits = torch.tensor([[-math.inf, -math.inf, -math.inf, 1.0]])
        (result,) = Sampler().sample(logits, [_state(min_tokens=1)])
        assert isinstance(result, UnusableLogits)
        assert "min_tokens" in str(result.error)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8},
    {"top_k": 5, "logprobs": 0},
    {"top_p": 0.7},
    {"min_p": 0.1, "temperature": 2.0},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"min_tokens": 4, "logit_bias": {EOS: 50.0}, "stop_token_ids": [5]},
    {"temperature": 0, "repetition_penalty": 3.0},
    {"forced_token_ids": [1, 2, 3, 4, 5, 6], "logprobs": 2},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "logprobs": 5},
]


def _run(rows: Sequence[int], steps: int = 6) -> dict[int, list[SampledToken | UnusableLogits]]:
    states = [_state(seed=100 + row, **MIXED[row]) for row in rows]
    results: dict[int, list[SampledToken | UnusableLogits]] = {row: [] for row in rows}
    for step in range(steps):
        logits = _logits(len(MIXED), 997, seed=step, spread=1.5)[list(rows)]
        for row, result in zip(rows, Sampler().sample(logits, states), strict=True):
            results[row].append(result)
    return results


class TestRowsAreIndependent:
    def test_batch_of_n_is_n_alone(self) -> None:
        together = _run(range(len(MIXED)))
        alone = {row: _run([row])[row] for row in range(len(MIXED))}
        assert together == alone

    def test_order_of_rows_does_not_matter(self) -> None:
        rows = list(range(len(MIXED)))
        assert _run(rows) == _run(rows[::-1])

    def test_sequence_goes_on_unchanged_after_a_pause(self) -> None:
        options: dict[str, Any] = {"repetition_penalty": 1.4, "top_p": 0.9}
        logits = _logits(6, 100, spread=1.0)
        plain, paused, other = (_state(seed=1, **options) for _ in range(3))
        expected = [_one(row, plain).token_id for row in logits]
        actual = [_one(row, paused).token_id for row in logits[:3]]
        for row in logits:
            _one(row, other)
        actual += [_one(row, paused).token_id for row in logits[3:]]
        assert actual == expected

    def test_seeds_decide(self) -> None:
        logits = torch.zeros(1000)

        def draw(**options: Any) -> list[int]:
            state = _state(**options)
            return [_one(logits, state).token_id for _ in range(5)]

        assert draw(seed=1) == draw(seed=1)
        assert draw(seed=1) != draw(seed=2)
        own, default = SamplingParams(seed=7), SamplingParams()
        states = [
            SamplingState.create(own, [], 1),
            SamplingState.create(own, [], 2),
            SamplingState.create(default, [], 7),
            SamplingState.create(own, [], 1, index=1),
            SamplingState.create(default, [], 8),
        ]
        a, b, c, d, e = (_one(logits, state).token_id for state in states)
        assert a == b == c != d == e

    def test_largest_seed_has_an_index_after_it(self) -> None:
        params = SamplingParams(seed=2**64 - 1)
        state = SamplingState.create(params, [], 0, index=1)
        assert state.generator.initial_seed() == 0


class TestUnusableRows:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"forced_token_ids": [1]}])
    def test_bad_row_fails_alone(self, value: float, options: dict[str, Any]) -> None:
        logits = _logits(3, 1000)
        logits[1, 777] = value
        states = [_state(seed=row, **options) for row in range(3)]
        results = Sampler().sample(logits, states)
        assert isinstance(results[1], UnusableLogits)
        assert "finite" in str(results[1].error)
        assert states[1].num_output_tokens == 0
        for row in (0, 2):
            assert results[row] == _one(logits[row], _state(seed=row, **options))

    def test_row_without_any_possible_token_is_bad(self) -> None:
        (result,) = Sampler().sample(torch.full((1, 9), -math.inf), [_state()])
        assert isinstance(result, UnusableLogits)

    def test_rows_and_states_must_match(self) -> None:
        with pytest.raises(EngineError, match=r"got \[2, 9\]"):
            Sampler().sample(torch.zeros(2, 9), [_state()])


class TestForcedTokens:
    def test_are_taken_with_their_logprobs_until_they_run_out(self) -> None:
        forced = [5, 0, 9]
        state = _state(forced_token_ids=forced, repetition_penalty=1.5, min_tokens=2)
        logits = _logits(3, 10)
        for row, token_id in zip(logits, forced, strict=True):
            assert not state.is_forced_out
            token = _one(row, state)
            assert token.token_id == token_id
            assert token.logprob == pytest.approx(float(row.log_softmax(-1)[token_id]), abs=1e-5)
            assert token.top is None
        assert state.is_forced_out
        with pytest.raises(EngineError, match="3 forced_token_ids"):
            _one(logits[0], state)


class TestLogprobs:
    @pytest.mark.parametrize("count", [0, 1, 5, 100, -1, 5000])
    def test_are_those_of_the_raw_logits(self, count: int) -> None:
        logits = _logits(1, 1000, spread=4.0)[0]
        token = _one(logits, _state(temperature=2.0, top_k=50, presence_penalty=1, logprobs=count))
        expected = logits.double().log_softmax(-1)
        order = expected.argsort(descending=True).tolist()
        assert token.top is not None
        assert next(iter(token.top)) == token.token_id
        wanted = order if count == -1 else order[:count]
        assert set(token.top) == {token.token_id, *wanted}
        assert token.logprob == token.top[token.token_id].logprob
        for token_id, logprob in token.top.items():
            assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
            assert logprob.rank == order.index(token_id) + 1

    def test_none_asked_for_none_given(self) -> None:
        assert _one(_logits(1, 10), _state()).top is None
        assert _one(_logits(1, 10), _state()).logprob is None

    def test_ranks_of_ties_are_distinct_and_in_id_order(self) -> None:
        logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
        token = _one(logits, _state(forced_token_ids=[3], logprobs=3))
        assert token.top is not None
        assert {token_id: entry.rank for token_id, entry in token.top.items()} == {
            3: 4,
            1: 1,
            0: 2,
            2: 3,
        }

    def test_possible_token_beside_impossible_ones(self) -> None:
        logits = torch.tensor([-math.inf, 0.0, -math.inf])
        token = _one(logits, _state(logprobs=-1))
        assert token.top is not None
        assert [token.top[token_id].logprob for token_id in range(3)] == [-math.inf, 0.0, -math.inf]


class TestPromptLogprobs:
    def test_actual_token_first_then_the_most_probable(self) -> None:
        logits = _logits(4, 200)
        following = [17, 0, int(logits[2].argmax()), 199]
        results = prompt_logprobs(logits, following, 2)
        expected = logits.double().log_softmax(-1)
        for row, (token_id, entries) in enumerate(zip(following, results, strict=True)):
            best = expected[row].argsort(descending=True).tolist()
            assert next(iter(entries)) == token_id
            assert set(entries) == {token_id, *best[:2]}
            assert entries[token_id].rank == best.index(token_id) + 1
            assert entries[token_id].logprob == pytest.approx(
                float(expected[row, token_id]), abs=1e-5
            )

    def test_full_vocabulary_sums_to_one(self) -> None:
        (entries,) = prompt_logprobs(_logits(1, 300), [1], -1)
        assert len(entries) == 300
        total = math.fsum(math.exp(entry.logprob) for entry in entries.values())
        assert total == pytest.approx(1, abs=1e-5)

    def test_bad_logits_are_an_error(self) -> None:
        logits = _logits(2, 10)
        logits[1, 3] = math.nan
        with pytest.raises(EngineError, match="nan"):
            prompt_logprobs(logits, [1, 2], 0)
