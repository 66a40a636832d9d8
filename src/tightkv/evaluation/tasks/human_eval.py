"""HumanEval: Python functions from their docstrings, arXiv:2107.03374; pass@1 of greedy answers.

The answer ends where a new top-level statement begins, as in lm-evaluation-harness's `humaneval`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tightkv.engine.sampling_params import SamplingParams
from tightkv.evaluation.tasks.item import Answers, Item
from tightkv.evaluation.tasks.records import Record
from tightkv.evaluation.tasks.sandbox import run_program
from tightkv.evaluation.tasks.task import ItemTask, Tokenize

__all__ = ["HumanEval"]

_MAX_TOKENS = 512  # the longest published solution has half as many
_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


class HumanEval(ItemTask):
    """Records with `prompt`, `test` and `entry_point`."""

    def __init__(self, sha256: str, seed: int, items: Sequence[tuple[str, Record]]) -> None:
        super().__init__("humaneval", sha256, seed)
        for _, record in items:
            for name in ("prompt", "test", "entry_point"):
                record.text(name)
        self._items = items

    def make_items(self, tokenize: Tokenize) -> dict[str, Item]:
        return {name: _item(record, tokenize) for name, record in self._items}


def _item(record: Record, tokenize: Tokenize) -> Item:
    prompt, test = record.text("prompt"), record.text("test")
    call = f"check({record.text('entry_point')})"

    def score(answers: Answers) -> dict[str, float]:
        return {"pass@1": float(run_program(f"{prompt}{answers[0].text}\n{test}\n{call}\n"))}

    params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS, stop=_STOP)
    return Item(((tokenize(prompt), params),), score)
