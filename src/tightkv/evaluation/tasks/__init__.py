"""Tasks: items with a right answer, which both arms solve, compared in pairs."""

from tightkv.evaluation.tasks.parse import parse_task, parse_tasks
from tightkv.evaluation.tasks.run import run_task
from tightkv.evaluation.tasks.task import Task

__all__ = ["Task", "parse_task", "parse_tasks", "run_task"]
