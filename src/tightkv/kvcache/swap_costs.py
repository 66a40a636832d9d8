"""What moving blocks costs, and what computing them anew costs, both as measured so far."""

from __future__ import annotations

__all__ = ["Rate", "SwapCosts"]

_MEMORY = 0.9
"""What an earlier measurement counts for when one more has come."""


class Rate:
    """So much per second, over the last measurements; the longer one took, the more it counts."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Take in one more measurement; one of nothing is none."""
        if amount:
            self._amount = _MEMORY * self._amount + amount
            self._seconds = _MEMORY * self._seconds + seconds

    @property
    def per_second(self) -> float | None:
        """None until something was measured."""
        return self._amount / self._seconds if self._seconds else None

    def seconds_for(self, amount: float) -> float:
        """How long so much would take; 0 until something was measured."""
        return amount * self._seconds / self._amount if self._amount else 0.0


class SwapCosts:
    """Speeds of copies to and from the swap space in bytes, and of prefill in tokens.

    Attributes:
        ignores_costs: whether blocks are moved whatever it costs.
    """

    def __init__(self, *, ignores_costs: bool = False) -> None:
        self.ignores_costs = ignores_costs
        self.copy_out = Rate()
        self.copy_in = Rate()
        self.prefill = Rate()

    def seconds_to_swap(self, bytes_out: int, bytes_in: int) -> float:
        """How long the copies out and back in take."""
        return self.copy_out.seconds_for(bytes_out) + self.copy_in.seconds_for(bytes_in)

    def seconds_to_compute(self, num_tokens: int) -> float:
        """How long a prefill of the tokens takes."""
        return self.prefill.seconds_for(num_tokens)

    def prefers_swap(self, bytes_out: int, bytes_in: int, num_tokens: int) -> bool:
        """Whether to move bytes instead of computing their tokens anew.

        Before a prompt was timed the answer is yes: a copy is the likelier one to be faster.
        """
        if self.ignores_costs or self.prefill.per_second is None:
            return True
        return self.seconds_to_swap(bytes_out, bytes_in) < self.seconds_to_compute(num_tokens)
