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
        num_swaps: preempted sequences whose blocks were moved to the swap space.
        num_swap_fallbacks: sequences that were to be moved or moved back but are computed anew: the
            space was full, or a copy failed.
        num_swapped_out_blocks: blocks copied to the swap space, those of the prefix cache too; a
            block of each layer group counts.
        num_swapped_in_blocks: blocks copied back.
        num_fetched_tokens: tokens of sequences whose K and V the prefix cache had lost but
            the swap space had kept.
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
    num_swaps: int = 0
    num_swap_fallbacks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_fetched_tokens: int = 0
    clip_rates: dict[int, tuple[float, float]] = field(default_factory=dict)
