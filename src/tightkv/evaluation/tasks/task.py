"""What a task is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from tightkv.calibration.progress import Progress
from tightkv.evaluation.arms import Arms
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.tasks.item import Item, Scores, score_all

__all__ = ["ItemTask", "Task", "Tokenize"]

Tokenize = Callable[..., list[int]]
"""`LLMEngine.tokenize`."""


class Task(ABC):
    """A named set of items.

    Attributes:
        name: as in the report; no two tasks of a run have the same.
        sha256: of all that decides the items and their scores, but the model.
        seed: of the choice of items, and of the statistics.
    """

    def __init__(self, name: str, sha256: str, seed: int) -> None:
        self.name = name
        self.sha256 = sha256
        self.seed = seed

    @abstractmethod
    def measure(self, arms: Arms, journal: Journal, progress: Progress) -> dict[str, Scores]:
        """Scores by arm, of the same items in each.

        Raises:
            RequestError: if the task cannot be run; before anything runs, if it is known then.
            EngineError: if a request failed.
        """


class ItemTask(Task):
    """A task of ours: each item is journaled by itself, so that a run goes on where it was."""

    @abstractmethod
    def make_items(self, tokenize: Tokenize) -> dict[str, Item]:
        """All items, by names that are the same from run to run."""

    def measure(self, arms: Arms, journal: Journal, progress: Progress) -> dict[str, Scores]:
        items = self.make_items(arms.base.engine.tokenize)
        return score_all(items, arms, journal, f"task/{self.name}", progress)
