"""Tasks as they are named on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from tightkv.config import EvaluationConfig
from tightkv.errors import RequestError
from tightkv.evaluation.tasks.gsm8k import GSM8K_FEWSHOT, Gsm8k
from tightkv.evaluation.tasks.human_eval import HumanEval
from tightkv.evaluation.tasks.lm_harness import HarnessTask
from tightkv.evaluation.tasks.multiple_choice import (
    MultipleChoice,
    Question,
    question_of_object,
    question_of_row,
)
from tightkv.evaluation.tasks.records import (
    Record,
    Records,
    choose,
    digest_of,
    read_csv,
    read_hub,
    read_json_lines,
)
from tightkv.evaluation.tasks.task import Task

__all__ = ["parse_task", "parse_tasks"]

_HARNESS = "lm_eval:"
_CHOICE_EXAMPLES = 5


def parse_tasks(config: EvaluationConfig) -> tuple[Task, ...]:
    """All tasks of a run; errors as in `parse_task`, and if two have the same name."""
    tasks = tuple(parse_task(text, config) for text in config.tasks)
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"The task {name} is given twice: leave one out.")
    return tasks


def parse_task(text: str, config: EvaluationConfig) -> Task:
    """Read "gsm8k=FILE", "humaneval=FILE", "multiple_choice=FILE" or "lm_eval:NAME".

    Without a file, gsm8k and humaneval are fetched from the hub. "FILE@EXAMPLES" takes the
    examples that precede each item from a second file.

    Args:
        text: the task.
        config: limit, seed, and whether programs may be run.

    Raises:
        RequestError: if there is no such task, or its file cannot be used; names file and line.
    """
    if text.startswith(_HARNESS):
        return HarnessTask(text.removeprefix(_HARNESS), config.task_limit, config.seed)
    kind, _, names = text.partition("=")
    make = _KINDS.get(kind)
    if make is None:
        known = [f"{name}=FILE" for name in _KINDS]
        near = difflib.get_close_matches(kind, _KINDS, n=1)
        hint = f"did you mean {near[0]}={names or 'FILE'}?" if near else "give another."
        raise RequestError(
            f"There is no task {text!r}; there are {', '.join(known)} and {_HARNESS}NAME: {hint}"
        )
    if "=" in text and not names:
        raise RequestError(f"The task {text!r} names no file: give one after the =.")
    file, examples = _files(names)
    return make(file, examples, config)


def _gsm8k(file: Path | None, examples: Path | None, config: EvaluationConfig) -> Task:
    if file is None:
        records = read_hub("openai/gsm8k", "main", "test")
        shown = read_hub("openai/gsm8k", "main", "train")
    else:
        records = read_json_lines(file)
        shown = records if examples is None else read_json_lines(examples)
    rest = records.entries[GSM8K_FEWSHOT:] if shown is records else records.entries
    if len(shown.entries) < GSM8K_FEWSHOT or not rest:
        source = shown.entries[0].where.rpartition(",")[0]
        raise RequestError(
            f"{source} has {len(shown.entries)} problems, of which gsm8k shows {GSM8K_FEWSHOT} "
            "before each item: give more, or a second file of examples, as gsm8k=FILE@EXAMPLES."
        )
    return Gsm8k(
        _digest("gsm8k", records, shown, config),
        config.seed,
        choose(rest, config.task_limit, config.seed),
        shown.entries[:GSM8K_FEWSHOT],
    )


def _human_eval(file: Path | None, examples: Path | None, config: EvaluationConfig) -> Task:
    if examples is not None:
        raise RequestError(f"humaneval shows no examples: leave out @{examples}.")
    if not config.allow_code_execution:
        raise RequestError(
            "humaneval runs programs that the model writes, in a limited process: allow it with "
            "--allow-code-execution, or leave humaneval out."
        )
    if file is None:
        records = read_hub("openai/openai_humaneval", None, "test")
    else:
        records = read_json_lines(file)
    return HumanEval(
        _digest("humaneval", records, records, config),
        config.seed,
        choose(records.entries, config.task_limit, config.seed),
    )


def _multiple_choice(file: Path | None, examples: Path | None, config: EvaluationConfig) -> Task:
    if file is None:
        raise RequestError("multiple_choice needs a file: give multiple_choice=FILE.csv or .jsonl.")
    records, questions = _questions(file)
    shown: tuple[Records, list[Question]] = (records, [])
    if examples is not None:
        shown = _questions(examples)
    return MultipleChoice(
        f"multiple_choice:{file.name.partition('.')[0]}",
        _digest("multiple_choice", records, shown[0], config),
        config.seed,
        choose(questions, config.task_limit, config.seed),
        shown[1][:_CHOICE_EXAMPLES],
    )


def _questions(file: Path) -> tuple[Records, list[Question]]:
    is_csv = file.name.removesuffix(".gz").endswith(".csv")
    records = read_csv(file) if is_csv else read_json_lines(file)
    read: Callable[[Record], Question] = question_of_row if is_csv else question_of_object
    return records, [read(record) for record in records.entries]


_Make = Callable[[Path | None, Path | None, EvaluationConfig], Task]

_KINDS: dict[str, _Make] = {
    "gsm8k": _gsm8k,
    "humaneval": _human_eval,
    "multiple_choice": _multiple_choice,
}


def _files(names: str) -> tuple[Path | None, Path | None]:
    """The file and that of the examples, as far as they are given."""
    whole = Path(names).expanduser()
    if not names or whole.exists():
        return (whole if names else None), None
    file, _, examples = names.partition("@")
    return Path(file).expanduser(), Path(examples).expanduser() if examples else None


def _digest(kind: str, records: Records, examples: Records, config: EvaluationConfig) -> str:
    return digest_of(kind, records.sha256, examples.sha256, config.task_limit, config.seed)
