"""Scales that could be taken for K or V of a layer, made from its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tightkv.calibration.statistics import LayerStatistics, TensorStatistics
from tightkv.errors import ConfigError
from tightkv.formats import Granularity, TensorScale
from tightkv.formats.base import CODE_TYPES
from tightkv.formats.registry import canonical
from tightkv.formats.scales import audible

__all__ = ["DYNAMIC", "GRANULARITIES", "METHODS", "PLAIN", "Candidate", "Method", "candidates"]

GranularityChoice = Literal["auto", "tensor", "head", "channel"]
MethodName = Literal["absmax", "percentile", "mse"]

GRANULARITIES: tuple[GranularityChoice, ...] = ("auto", "tensor", "head", "channel")
METHODS: tuple[MethodName, ...] = ("absmax", "percentile", "mse")

_TWO_FACTOR_EXPONENTS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_QUERY_EXPONENTS = {"k": (0.0, 0.2), "v": (0.0,)}
_MARGINS = (1.0, 1.25, 1.5, 2.0)
_CLIPS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_PERCENTILE = 0.9999
_LARGEST_MARGIN = 100.0


@dataclass(frozen=True, slots=True)
class Method:
    """How scales are made.

    Attributes:
        static: scales without a dynamic part; otherwise the two-factor form.
        granularity: of static scales; "auto" takes the best for each layer.
        name: what a static scale is derived from: the largest magnitude seen, the 99.99th
            percentile, or the clip that gives the least error.
        margin: static scales times this; None takes the best of some.

    Raises:
        ConfigError: for an unknown name, or options that contradict each other.
    """

    static: bool = False
    granularity: GranularityChoice = "auto"
    name: MethodName = "absmax"
    margin: float | None = None

    def __post_init__(self) -> None:
        for name, given, allowed in (
            ("granularity", self.granularity, GRANULARITIES),
            ("method", self.name, METHODS),
        ):
            if given not in allowed:
                raise ConfigError(f"Unknown {name} {given!r}: choose one of {', '.join(allowed)}.")
        if not self.static and (self.granularity, self.name, self.margin) != (
            "auto",
            "absmax",
            None,
        ):
            raise ConfigError(
                "granularity, method and margin belong to static scales, and these are not: set "
                "static, or leave them out."
            )
        if self.margin is not None and not 0 < self.margin <= _LARGEST_MARGIN:
            raise ConfigError(
                f"margin is {self.margin}: it must be above 0 and at most {_LARGEST_MARGIN:g}."
            )

    def describe(self) -> str:
        """In words, for the file."""
        if not self.static:
            return "two-factor"
        return f"static, granularity {self.granularity}, {self.name}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to make a scale from the statistics of any layer.

    Attributes:
        dynamic: the two-factor form.
        exponent: of the two-factor form, how far channels are evened out: 0 not at all, 1 until all
            are equally loud.
        query_exponent: how much finer the channels are stored whose queries are large (K alone).
        granularity: of a static scale.
        factor: what a static scale is multiplied by.
    """

    dynamic: bool = False
    exponent: float = 1.0
    query_exponent: float = 0.0
    granularity: Granularity = Granularity.CHANNEL
    factor: float = 1.0

    def describe(self) -> str:
        """In a few characters, for a table."""
        if self.dynamic:
            query = f"/q^{self.query_exponent:g}" if self.query_exponent else ""
            return f"absmax^{self.exponent:g}{query}"
        return f"{self.granularity.value} ×{self.factor:g}"

    def scale(
        self, layer: LayerStatistics, name: str, method: Method, kv_cache_dtype: str
    ) -> TensorScale:
        """The scale for K (`name` "k") or V ("v") of a layer."""
        statistics: TensorStatistics = getattr(layer, name)
        if self.dynamic:
            values = audible(statistics.range) ** self.exponent
            if self.query_exponent:
                values = values / audible(layer.query_rms) ** self.query_exponent
            return TensorScale(values, dynamic=True)
        largest = statistics.range
        if method.name == "percentile":
            largest = torch.maximum(statistics.percentile(_PERCENTILE), statistics.sink_absmax)
        levels = CODE_TYPES[canonical(kv_cache_dtype)].max_value
        return TensorScale(self._reduced(audible(largest)) * (self.factor / levels))

    def _reduced(self, largest: torch.Tensor) -> torch.Tensor:
        """`[num_kv_heads, size]` to the shape of the granularity."""
        if self.granularity is Granularity.TENSOR:
            return largest.amax()
        of_head = largest.amax(dim=-1)
        if self.granularity is Granularity.HEAD:
            return of_head
        # Quiet channels keep room above what was seen of them, the more the quieter they are: text
        # of another kind soon goes beyond it.
        return (largest * of_head[:, None]).sqrt()


PLAIN = Candidate(granularity=Granularity.TENSOR)
"""One scale for all of K or V, from the largest magnitude seen."""

DYNAMIC = Candidate(dynamic=True, exponent=0.0)
"""Dynamic scales alone."""


def candidates(method: Method, name: str) -> list[Candidate]:
    """All that the method may choose from, for K (`name` "k") or V ("v")."""
    if not method.static:
        return [
            Candidate(dynamic=True, exponent=exponent, query_exponent=query)
            for exponent in _TWO_FACTOR_EXPONENTS
            for query in _QUERY_EXPONENTS[name]
        ]
    if method.margin is not None:
        factors: tuple[float, ...] = (method.margin,)
    else:
        factors = (*_CLIPS, *_MARGINS) if method.name == "mse" else _MARGINS
    return [
        Candidate(granularity=granularity, factor=factor)
        for granularity in Granularity
        if method.granularity in ("auto", granularity.value)
        for factor in factors
    ]
