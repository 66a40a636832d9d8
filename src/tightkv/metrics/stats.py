"""Counters of an engine since its start."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["EngineStats"]


@dataclass(slots=True)
class EngineStats:
    """Counters, which only grow, and shares.

    Attributes:
        prefix_cache_queries: prompt tokens of started sequences.
        prefix_cache_hits: those among them whose K and V were found.
        num_preempted_tokens: computed tokens that preemption threw away.
        clip_rates: by layer, shares of the values of K and of V that were clipped when written, as
            last looked at (every some steps, and when the engine runs idle).
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    clip_rates: dict[int, tuple[float, float]] = field(default_factory=dict)
