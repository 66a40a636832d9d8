"""Tasks of lm-evaluation-harness, whose model is an arm in this process."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import math
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tightkv.calibration.progress import Progress
from tightkv.errors import RequestError, TightKVError
from tightkv.evaluation.arms import Arm, Arms
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.tasks.harness_model import harness_model
from tightkv.evaluation.tasks.item import Scores
from tightkv.evaluation.tasks.records import choose, digest_of
from tightkv.evaluation.tasks.task import Task
from tightkv.models import one_line

__all__ = ["HarnessTask"]


class HarnessTask(Task):
    """A task, group or tag by name, a task's YAML file, or a folder of such files.

    Items of all tasks of a group are put together, metric by metric. Prompts and examples are the
    task's own, without a chat template.
    """

    def __init__(self, spec: str, limit: int | None, seed: int) -> None:
        """Look the task up.

        Args:
            spec: the name, file or folder.
            limit: items of each of its tasks; None or 0: all.
            seed: of their choice.

        Raises:
            RequestError: if lm_eval is not installed, or does not know the task.
        """
        self._manager, self._specs, content = _look_up(spec)
        # Of a file or folder its name alone: where it lies says nothing.
        name = Path(spec).stem if content else spec
        digest = digest_of("lm_eval", version("lm_eval"), name, content, limit, seed)
        super().__init__(f"lm_eval:{name}", digest, seed)
        self._limit = limit

    def measure(self, arms: Arms, journal: Journal, progress: Progress) -> dict[str, Scores]:
        return {
            arm.name: journal.once(
                f"task/{self.name}/{arm.name}", partial(self._evaluate, arm, progress)
            )
            for arm in arms
        }

    def _evaluate(self, arm: Arm, progress: Progress) -> dict[str, dict[str, float]]:
        import lm_eval

        with _foreign(self.name), _silence() as stderr:
            stage = f"task/{self.name}/{arm.name}"  # how much there is to ask is known arm by arm
            lm = harness_model(arm, self.name, stage, progress, stderr)
            tasks = self._manager.load(self._specs)["tasks"]
            samples = {name: _sample(task, self._limit, self.seed) for name, task in tasks.items()}
            results = lm_eval.simple_evaluate(
                model=lm,
                tasks=self._specs,
                task_manager=self._manager,
                samples=samples if self._limit else None,
                log_samples=True,
                bootstrap_iters=0,
            )
        return _scores(self.name, results)


def _look_up(spec: str) -> tuple[Any, list[str], str]:
    """lm-eval's manager of tasks, what to load with it, and the digest of local files."""
    if importlib.util.find_spec("lm_eval") is None:
        raise RequestError(
            f"lm_eval:{spec} needs lm-evaluation-harness: install tightkv[lm-eval], or leave the "
            "task out."
        )
    path = Path(spec).expanduser()
    with _foreign(f"lm_eval:{spec}"), _silence():
        from lm_eval.tasks import TaskManager

        if path.exists():
            folder = path if path.is_dir() else path.parent
            manager = TaskManager(include_path=str(folder), include_defaults=False)
            specs = list(manager.all_subtasks) if path.is_dir() else [str(path)]
            content = [
                hashlib.sha256(file.read_bytes()).hexdigest()
                for file in sorted(folder.rglob("*"))
                if file.suffix in (".yaml", ".py")
            ]
        else:
            manager = TaskManager()
            specs = [spec] if spec in manager.all_tasks else []
            content = []
    if not specs:
        raise RequestError(
            f"lm-evaluation-harness has no task {spec!r}: `lm_eval ls tasks` lists all; or name a "
            "task's YAML file, or a folder of them."
        )
    return manager, specs, "".join(content)


def _sample(task: Any, limit: int | None, seed: int) -> list[int]:
    """Numbers of the chosen items; lm-eval wants them in order."""
    return sorted(int(name) for name, _ in choose(range(len(task.eval_docs)), limit, seed))


@contextlib.contextmanager
def _foreign(name: str) -> Iterator[None]:
    """Errors of lm-eval and of the data sets that it loads, in one sentence."""
    try:
        yield
    except TightKVError:
        raise
    except Exception as error:
        raise RequestError(
            f"lm-evaluation-harness cannot run {name} ({one_line(error)}): check the task; data "
            "sets of the hub need a network."
        ) from error


@contextlib.contextmanager
def _silence() -> Iterator[Any]:
    """Leave out lm-eval's own bars; gives the standard error to those who have to say something."""
    stderr = sys.stderr
    with contextlib.redirect_stderr(io.StringIO()):
        yield stderr


def _scores(name: str, results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Per item "task/number", by "metric" or "metric,filter"."""
    scores: dict[str, dict[str, float]] = {}
    for task, samples in results["samples"].items():
        higher = results["higher_is_better"].get(task, {})
        for sample in samples:
            item = scores.setdefault(f"{task}/{sample['doc_id']}", {})
            for metric in sample["metrics"]:
                value = _score(metric, sample[metric], higher.get(metric))
                if value is not None:
                    item[_metric_name(metric, sample["filter"])] = value
    if not any(scores.values()):
        raise RequestError(
            f"{name} has no metric of single items of which more is better, so that arms cannot be "
            "compared in pairs: take another task."
        )
    return scores


def _metric_name(metric: str, filtered: str) -> str:
    return metric if filtered == "none" else f"{metric},{filtered}"


def _score(metric: str, value: Any, higher_is_better: bool | None) -> float | None:
    """An item's score, of which more is better; None where it has no number by itself."""
    if isinstance(value, tuple) and len(value) == 2:
        # Of word_perplexity and its like: log-likelihood, and how many words or bytes share it.
        value, weight = value
        return float(value) / weight if weight else None
    if not isinstance(value, bool | int | float):
        return None
    # An item's "perplexity" is its log-likelihood; exp comes after the mean.
    if higher_is_better is False and metric != "perplexity":
        return None
    return float(value) if math.isfinite(value) else None
