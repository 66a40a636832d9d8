"""Running a task in all arms."""

from __future__ import annotations

from tightkv.calibration.progress import Progress
from tightkv.evaluation.arms import Arms
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.paired import compare_items
from tightkv.evaluation.report import TaskFigures
from tightkv.evaluation.tasks.item import Scores
from tightkv.evaluation.tasks.task import Task

__all__ = ["run_task"]


def run_task(
    task: Task, arms: Arms, journal: Journal, progress: Progress
) -> dict[str, tuple[TaskFigures, ...]]:
    """Solve the items of a task in each arm, and compare with the baseline.

    Args:
        task: from `parse_task`.
        arms: the baseline and the others.
        journal: has the items' scores under "task/{task}/{arm}/{item}".
        progress: called after each item.

    Returns:
        Figures of each metric, by name of the arm, without the baseline.

    Raises:
        RequestError: if the task cannot be run.
        EngineError: if a request failed.
    """
    scores = task.measure(arms, journal, progress)
    base = scores[arms.base.name]
    return {arm.name: _figures(task, base, scores[arm.name]) for arm in arms.others}


def _figures(task: Task, base: Scores, other: Scores) -> tuple[TaskFigures, ...]:
    metrics = sorted({metric for score in base.values() for metric in score})
    return tuple(
        compare_items(
            task.name,
            metric,
            [score[metric] for score in base.values() if metric in score],
            [other[name][metric] for name, score in base.items() if metric in score],
            task.seed,
        )
        for metric in metrics
    )
