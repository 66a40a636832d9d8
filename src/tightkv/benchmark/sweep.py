"""Comma lists, and means over repetitions, as llama-bench has them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tightkv.errors import ConfigError

__all__ = ["MeanStd", "parse_numbers"]


@dataclass(frozen=True, slots=True)
class MeanStd:
    """A figure over repetitions.

    Attributes:
        samples: one of each.
    """

    samples: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def std(self) -> float:
        """Of the sample (divided by n - 1); 0 of one."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.std:.2f}" if len(self.samples) > 1 else f"{self.mean:.2f}"

    def as_json(self, name: str) -> dict[str, Any]:
        return {
            f"avg_{name}": self.mean,
            f"stddev_{name}": self.std,
            f"samples_{name}": [*self.samples],
        }


def parse_numbers(flag: str, text: str, least: int = 1) -> tuple[int, ...]:
    """Whole numbers of a comma list.

    Raises:
        ConfigError: names the flag.
    """
    try:
        numbers: Sequence[int] = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < least:
        raise ConfigError(
            f"{flag} is {text!r}: give whole numbers from {least} on, with commas between."
        )
    return tuple(numbers)
