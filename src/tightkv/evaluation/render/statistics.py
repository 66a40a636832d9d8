"""The rows of `llama-perplexity --kl-divergence`, in its order and words."""

from __future__ import annotations

import math
from collections.abc import Callable

from tightkv.metrics import DivergenceFigures, Spread

__all__ = ["Block", "statistics_blocks"]

Block = tuple[str, list[tuple[str, str]]]


def statistics_blocks(figures: DivergenceFigures) -> list[Block]:
    """Three blocks: a title, and rows of a name and a value."""
    return [
        ("Perplexity statistics", _perplexity(figures)),
        ("KL divergence statistics", _divergence(figures)),
        ("Token probability statistics", _token_probability(figures)),
    ]


def _perplexity(of: DivergenceFigures) -> list[tuple[str, str]]:
    rows = [
        ("Mean PPL(Q)", _with_error(of.ppl, of.ppl_standard_error)),
        ("Mean PPL(base)", _with_error(of.ppl_base, of.ppl_base_standard_error)),
        ("Cor(ln(PPL(Q)), ln(PPL(base)))", f"{100 * of.ln_correlation:6.2f}%"),
        ("Mean ln(PPL(Q)/PPL(base))", _with_error(of.ln_ratio, of.ln_ratio_standard_error)),
        ("Mean PPL(Q)/PPL(base)", _with_error(of.ppl_ratio, of.ppl_ratio_standard_error)),
        (
            "Mean PPL(Q)-PPL(base)",
            _with_error(of.ppl_difference, of.ppl_difference_standard_error),
        ),
    ]
    return [(f"{name:<30}", value) for name, value in rows]


def _divergence(figures: DivergenceFigures) -> list[tuple[str, str]]:
    kld = figures.kld
    mean = f"{_nats(kld.mean)} ± {_nats(kld.standard_error)}"
    return _distribution("KLD", kld, mean, _nats)


def _token_probability(figures: DivergenceFigures) -> list[tuple[str, str]]:
    mean, error = 100 * figures.delta_p.mean, 100 * figures.delta_p.standard_error
    rms, rms_error = 100 * figures.rms_delta_p, 100 * figures.rms_delta_p_standard_error
    top, top_error = 100 * figures.same_top_p, 100 * figures.same_top_p_standard_error
    return [
        *_distribution("Δp", figures.delta_p, f"{mean:6.3f} ± {error:5.3f} %", _percent),
        ("RMS Δp    ", f"{rms:6.3f} ± {rms_error:5.3f} %"),
        ("Same top p", f"{top:6.3f} ± {top_error:5.3f} %"),
    ]


def _distribution(
    name: str, of: Spread, mean: str, written: Callable[[float], str]
) -> list[tuple[str, str]]:
    quantiles = sorted(of.quantiles.items(), key=lambda item: _percentage(item[0]), reverse=True)
    return [
        (f"Mean    {name}", mean),
        (f"Maximum {name}", written(of.maximum)),
        *((f"{_quantile_name(key):<7} {name}", written(value)) for key, value in quantiles),
        (f"Minimum {name}", written(of.minimum)),
    ]


def _with_error(value: float, error: float) -> str:
    return f"{value:10.6f} ± {error:10.6f}"


def _percentage(name: str) -> float:
    return 50.0 if name == "median" else float(name.rstrip("%"))


def _quantile_name(name: str) -> str:
    return "Median" if name == "median" else f"{_percentage(name):4.1f}%"


def _nats(value: float) -> str:
    # What six decimals would show as nothing is the noise floor, which is to be seen.
    if value == 0 or abs(value) >= 1e-6 or not math.isfinite(value):
        return f"{value:10.6f}"
    return f"{value:10.2e}"


def _percent(value: float) -> str:
    return f"{100 * value:6.3f}%"
