"""Figures of divergence, against the formulas written down with sums, and against hand results."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy
import pytest
import torch

from tightkv.metrics import Divergence, kl_divergence


def rows(num_rows: int, vocab_size: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    base = 3 * torch.randn(num_rows, vocab_size, generator=generator)
    return base, base + noise * torch.randn(num_rows, vocab_size, generator=generator)


def by_definition(base: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    p, q = torch.log_softmax(base.double(), -1), torch.log_softmax(other.double(), -1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 2), (9, 260), (13, 50_000), (3, 300_000)])
def test_kl_of_logits(num_rows: int, vocab_size: int) -> None:
    base, other = rows(num_rows, vocab_size, noise=0.02)
    expected = by_definition(base, other)
    assert torch.allclose(kl_divergence(base, other), expected, rtol=1e-9, atol=1e-13)
    assert (kl_divergence(base, base.clone()) == 0).all()
    next_token_ids = torch.arange(num_rows) % vocab_size
    (divergence,) = Divergence.of_arms(base, [other], next_token_ids)
    assert divergence.kl.tolist() == kl_divergence(base, other).tolist()
    for logits, logprob in ((other, divergence.logprob), (base, divergence.logprob_base)):
        logprobs = torch.log_softmax(logits.double(), -1)
        assert numpy.allclose(logprob, logprobs[torch.arange(num_rows), next_token_ids])
    assert (divergence.same_top == (base.argmax(-1) == other.argmax(-1)).numpy()).all()


def test_kl_by_hand() -> None:
    base = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]).log() + 7
    assert kl_divergence(base, other).tolist() == pytest.approx([0.25 * math.log(2), 0], abs=1e-6)


def test_tokens_that_the_arm_rules_out_almost() -> None:
    """Where the arm has less than float32 can hold, the divergence is still finite and right."""
    base, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[200.0, 0.0]])
    assert kl_divergence(base, other).tolist() == pytest.approx([100 - math.log(2)])
    assert kl_divergence(other, base).tolist() == pytest.approx([math.log(2)])


def test_tokens_that_are_ruled_out() -> None:
    base, other = rows(4, 100, noise=0.1)
    expected = kl_divergence(base[:, 1:], other[:, 1:])
    base[:, 0] = other[:, 0] = -torch.inf
    assert torch.allclose(kl_divergence(base, other), expected, rtol=1e-9)
    assert (kl_divergence(base, base.clone()) == 0).all()


def test_no_rows() -> None:
    nothing = torch.zeros(0, 5)
    assert kl_divergence(nothing, nothing).shape == (0,)
    (empty,) = Divergence.of_arms(nothing, [nothing], torch.zeros(0, dtype=torch.int64))
    assert len(empty) == 0
    assert len(Divergence.concatenated([])) == 0


def example(num_tokens: int = 400) -> Divergence:
    generator = numpy.random.default_rng(5)
    logprob_base = -generator.exponential(2.0, num_tokens)
    return Divergence(
        kl=generator.exponential(0.01, num_tokens),
        logprob=numpy.minimum(logprob_base + generator.normal(-0.01, 0.1, num_tokens), -1e-6),
        logprob_base=logprob_base,
        same_top=(generator.random(num_tokens) < 0.9).astype(float),
    )


def mean_and_error(values: numpy.ndarray) -> tuple[float, float]:
    """From sum and sum of squares, as llama-perplexity does."""
    count = len(values)
    mean = values.sum() / count
    return mean, math.sqrt(((values**2).sum() / count - mean**2) / (count - 1))


def test_perplexities() -> None:
    divergence = example()
    nll, nll_base = -divergence.logprob, -divergence.logprob_base
    (mean, error), (mean_base, error_base) = mean_and_error(nll), mean_and_error(nll_base)
    count = len(nll)
    covariance = ((nll * nll_base).sum() / count - mean * mean_base) / (count - 1)
    ratio_error = math.sqrt(error**2 + error_base**2 - 2 * covariance)
    ppl, ppl_base = math.exp(mean), math.exp(mean_base)
    difference_error = math.sqrt(
        (ppl * error) ** 2 + (ppl_base * error_base) ** 2 - 2 * ppl * ppl_base * covariance
    )
    figures = asdict(divergence.figures())
    expected = {
        "num_tokens": count,
        "ppl": ppl,
        "ppl_standard_error": ppl * error,
        "ppl_base": ppl_base,
        "ppl_base_standard_error": ppl_base * error_base,
        "ln_correlation": numpy.corrcoef(nll, nll_base)[0, 1],
        "ln_ratio": mean - mean_base,
        "ln_ratio_standard_error": ratio_error,
        "ppl_ratio": ppl / ppl_base,
        "ppl_ratio_standard_error": ppl / ppl_base * ratio_error,
        "ppl_difference": ppl - ppl_base,
        "ppl_difference_standard_error": difference_error,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_distributions() -> None:
    divergence = example()
    figures = divergence.figures()
    delta_p = numpy.exp(divergence.logprob) - numpy.exp(divergence.logprob_base)
    for values, spread in ((divergence.kl, figures.kld), (delta_p, figures.delta_p)):
        mean, error = mean_and_error(values)
        assert (spread.mean, spread.standard_error) == pytest.approx((mean, error))
        assert (spread.minimum, spread.maximum) == (values.min(), values.max())
        for name, quantile in spread.quantiles.items():
            share = 0.5 if name == "median" else float(name.rstrip("%")) / 100
            below, above = (numpy.sort(values)[f(share * 399)] for f in (math.floor, math.ceil))
            part = share * 399 - math.floor(share * 399)
            assert quantile == pytest.approx(below + part * (above - below))
    assert list(figures.kld.quantiles)[:5] == ["99.9%", "99%", "95%", "90%", "median"]
    mean_square, error = mean_and_error(delta_p**2)
    rms = math.sqrt(mean_square)
    assert figures.rms_delta_p == pytest.approx(rms)
    assert figures.rms_delta_p_standard_error == pytest.approx(error / (2 * rms))
    share = divergence.same_top.mean()
    assert figures.same_top_p == share
    binomial = math.sqrt(share * (1 - share) / (len(divergence) - 1))
    assert figures.same_top_p_standard_error == pytest.approx(binomial)


def test_an_arm_that_is_the_baseline() -> None:
    """Errors of differences are 0, where a difference of two variances might be below."""
    whole = example()
    same = Divergence(0 * whole.kl, whole.logprob, whole.logprob, whole.same_top**0)
    figures = same.figures()
    assert (figures.ppl_ratio, figures.ppl_ratio_standard_error) == (1, 0)
    assert (figures.ppl_difference, figures.ppl_difference_standard_error) == (0, 0)
    assert figures.ln_correlation == pytest.approx(1)
    assert (figures.rms_delta_p, figures.rms_delta_p_standard_error) == (0, 0)
    assert (figures.same_top_p, figures.same_top_p_standard_error) == (1, 0)


def test_one_token() -> None:
    figures = example()[:1].figures()
    assert figures.num_tokens == 1
    assert figures.kld.standard_error == 0
    assert figures.kld.quantiles["99.9%"] == figures.kld.mean


def test_some_tokens() -> None:
    whole = example()
    mask = numpy.arange(len(whole)) % 3 == 0
    again = Divergence.concatenated([whole[mask], whole[~mask]])
    assert len(whole[mask]) == mask.sum()
    assert again.figures().kld.mean == pytest.approx(whole.figures().kld.mean)
