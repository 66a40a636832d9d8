"""GSM8K: grade-school mathematics, arXiv:2110.14168.

Examples, then "Question: …" and "Answer:" on a line of its own; the answer is greedy. Prompt, ends
and what counts as right are those of lm-evaluation-harness's task `gsm8k`, version 3: `strict`
wants the number behind "####", `flexible` takes the last number of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import RequestError
from tightkv.evaluation.tasks.item import Answers, Item
from tightkv.evaluation.tasks.records import Record
from tightkv.evaluation.tasks.task import ItemTask, Tokenize

__all__ = ["GSM8K_FEWSHOT", "Gsm8k", "score_answer"]

GSM8K_FEWSHOT = 5

_MAX_TOKENS = 256
_STOP = ("Question:", "</s>", "<|im_end|>")
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))


class Gsm8k(ItemTask):
    """Records with `question` and `answer`, whose number follows "####"."""

    def __init__(
        self,
        sha256: str,
        seed: int,
        items: Sequence[tuple[str, Record]],
        examples: Sequence[Record],
    ) -> None:
        super().__init__("gsm8k", sha256, seed)
        for record in (*examples, *(record for _, record in items)):
            _check(record)
        self._items = items
        self._examples = "".join(
            f"{_asked(record)} {record.text('answer')}\n\n" for record in examples
        )

    def make_items(self, tokenize: Tokenize) -> dict[str, Item]:
        return {name: self._item(record, tokenize) for name, record in self._items}

    def _item(self, record: Record, tokenize: Tokenize) -> Item:
        params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS, stop=_STOP)
        prompt = tokenize(self._examples + _asked(record))
        reference = record.text("answer")

        def score(answers: Answers) -> dict[str, float]:
            return score_answer(answers[0].text, reference)

        return Item(((prompt, params),), score)


def score_answer(answer: str, reference: str) -> dict[str, float]:
    """Whether a text gives the number of the published answer, 1 or 0."""
    right = _normalized(reference)
    strict = _STRICT.search(answer)
    numbers = _FLEXIBLE.findall(answer)
    return {
        "exact_match,strict": float(strict is not None and _normalized(strict[1]) == right),
        "exact_match,flexible": float(bool(numbers) and _normalized(numbers[-1]) == right),
    }


def _normalized(text: str) -> str:
    for ignored in _IGNORED:
        text = ignored.sub("", text)
    return text.strip().lower()


def _asked(record: Record) -> str:
    return f"Question: {record.text('question')}\nAnswer:"


def _check(record: Record) -> None:
    record.text("question")
    if not _STRICT.search(record.text("answer")):
        raise RequestError(
            f'{record.where} has an answer without "#### " and a number: correct it.'
        )
