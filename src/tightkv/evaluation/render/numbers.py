"""How figures are written, the same in all forms of a report."""

from __future__ import annotations

import math

from tightkv.metrics import Spread

__all__ = [
    "change",
    "kld",
    "limit_percent",
    "percent",
    "points",
    "points_interval",
    "positions",
    "quantile",
    "ratio",
    "with_error",
]


def kld(value: float) -> str:
    """Three digits, as 0.000843; far below what matters, as 1.2e-7."""
    if not math.isfinite(value):
        return _not_finite(value)
    if value == 0 or abs(value) >= 1e-5:
        digits = 3 if value == 0 else max(3 - 1 - math.floor(math.log10(abs(value))), 2)
        text = f"{value:.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def with_error(value: float, error: float) -> str:
    """The value to the two leading digits of its standard error, as "0.00843 ± 0.00031"."""
    if not math.isfinite(value) or not math.isfinite(error) or error <= 0 or abs(value) < 1e-5:
        return f"{kld(value)} ± {kld(error)}"
    digits = min(max(1 - math.floor(math.log10(error)), 0), 8)
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def percent(share: float, digits: int = 2) -> str:
    """Of a share: 0.9873 is "98.73 %"."""
    if not math.isfinite(share):
        return _not_finite(share)
    text = f"{100 * share:.{digits}f}"
    if 0 < share < 1 and text in {f"{0:.{digits}f}", f"{100:.{digits}f}"}:
        # 0 and 100 are kept for what is so without exception.
        edge = 10.0**-digits
        return f"< {edge:g} %" if share < 0.5 else f"> {100 - edge:g} %"
    return f"{text} %"


def limit_percent(share: float) -> str:
    """Of a share that somebody chose: 0.94 is "94 %"."""
    return f"{100 * share:.6g} %"


def points(share: float) -> str:
    """Percentage points: 0.034 is "3.4"."""
    if not math.isfinite(share):
        return _not_finite(share)
    return f"{_unsigned_zero(100 * share, 1):.1f}".removesuffix(".0")


def points_interval(low: float, high: float) -> str:
    return f"{points(low)} to {points(high)}"


def ratio(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else _not_finite(value)


def change(value: float) -> str:
    """Of a ratio: 1.0052 is "+0.52 %"."""
    if not math.isfinite(value):
        return _not_finite(value)
    return f"{_unsigned_zero(100 * (value - 1), 2):+.2f} %"


def positions(begin: int, end: int) -> str:
    """Of tokens with `begin` to `end - 1` before them."""
    return f"{begin:,}–{end - 1:,}"  # noqa: RUF001 (an en dash, as between numbers in print)


def quantile(distribution: Spread, percentage: float) -> float | None:
    """The value below which that many of the tokens lie; None if it is not in the report."""
    for name, value in distribution.quantiles.items():
        if name != "median" and float(name.rstrip("%")) == percentage:
            return value
        if name == "median" and percentage == 50:
            return value
    return None


def _unsigned_zero(value: float, digits: int) -> float:
    return 0.0 if round(value, digits) == 0 else value


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
