"""How far a long calculation is."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress", "no_progress"]

Progress = Callable[[str, int, int], None]
"""Is told the stage, and how many of how many parts of it are done."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Tells nobody."""
