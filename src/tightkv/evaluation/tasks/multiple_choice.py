"""Questions with choices, scored by log-likelihood.

By letter, as lm-evaluation-harness's `mmlu`: the choices stand in the prompt, " A", " B" … follow
"Answer:". By text: each choice follows the question, and its log-likelihood is divided by the
number of its bytes.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

from tightkv.errors import RequestError
from tightkv.evaluation.tasks.item import Answers, Item
from tightkv.evaluation.tasks.likelihood import force, log_likelihood, split_tokens
from tightkv.evaluation.tasks.records import Record
from tightkv.evaluation.tasks.task import ItemTask, Tokenize

__all__ = ["MultipleChoice", "Question", "question_of_object", "question_of_row"]

_LETTERS = string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its choices.

    Attributes:
        right: index of the right choice.
        by_letter: whether letters are scored, or else the choices' texts.
    """

    text: str
    choices: tuple[str, ...]
    right: int
    by_letter: bool

    @property
    def asked(self) -> str:
        """What the model is asked to continue."""
        if not self.by_letter:
            return f"Question: {self.text}\nAnswer:"
        lettered = zip(_LETTERS, self.choices, strict=False)
        listed = "".join(f"{letter}. {choice}\n" for letter, choice in lettered)
        return f"{self.text}\n{listed}Answer:"

    @property
    def continuations(self) -> list[str]:
        """What may follow; one per choice."""
        ends = _LETTERS[: len(self.choices)] if self.by_letter else self.choices
        return [f" {end}" for end in ends]


class MultipleChoice(ItemTask):
    """Questions; those of `examples` come before each, with their answers."""

    def __init__(
        self,
        name: str,
        sha256: str,
        seed: int,
        items: Sequence[tuple[str, Question]],
        examples: Sequence[Question],
    ) -> None:
        super().__init__(name, sha256, seed)
        self._items = items
        self._examples = "".join(
            f"{example.asked}{example.continuations[example.right]}\n\n" for example in examples
        )

    def make_items(self, tokenize: Tokenize) -> dict[str, Item]:
        return {name: self._item(question, tokenize) for name, question in self._items}

    def _item(self, question: Question, tokenize: Tokenize) -> Item:
        context = self._examples + question.asked
        ends = question.continuations
        splits = [split_tokens(tokenize, context, end) for end in ends]
        requests = [force(splits[0][0], tokens) for _, tokens in splits]

        def score(answers: Answers) -> dict[str, float]:
            found = [log_likelihood(answer) for answer in answers]
            if not question.by_letter:
                sizes = [len(choice.encode()) for choice in question.choices]
                found = [value / size for value, size in zip(found, sizes, strict=True)]
            is_right = found.index(max(found)) == question.right
            return {"acc" if question.by_letter else "acc_norm": float(is_right)}

        return Item(requests, score)


def question_of_row(record: Record) -> Question:
    """MMLU's layout: question, choices, letter of the right one.

    Raises:
        RequestError: names file and line.
    """
    cells = [str(cell) for cell in record.fields.values()]
    text, answer = cells[0], cells[-1]
    choices = cells[1:-1]
    return _question(record.where, text, choices, answer, by_letter=True)


def question_of_object(record: Record) -> Question:
    """`question`, `choices`, `answer` (letter, or index from 0), and `score`: "letter" or "text".

    Raises:
        RequestError: names file and line.
    """
    fields = record.fields
    score = fields.get("score", "letter")
    if score not in ("letter", "text"):
        raise RequestError(f'{record.where} has the score {score!r}: give "letter" or "text".')
    choices = fields.get("choices")
    return _question(
        record.where,
        record.text("question"),
        choices if isinstance(choices, list) else [],
        fields.get("answer"),
        by_letter=score == "letter",
    )


def _question(
    where: str, text: str, choices: Sequence[object], answer: object, *, by_letter: bool
) -> Question:
    texts = tuple(choice.strip() for choice in choices if isinstance(choice, str))
    if len(texts) < 2 or not all((text.strip(), *texts)) or len(texts) < len(choices):
        raise RequestError(
            f"{where} has {len(texts)} choices, or an empty one: give a question, at least two "
            "choices that are texts, and the right one's letter."
        )
    if by_letter and len(texts) > len(_LETTERS):
        raise RequestError(
            f'{where} has {len(texts)} choices, more than there are letters: set "score" to "text".'
        )
    return Question(text.strip(), texts, _index(where, answer, len(texts)), by_letter)


def _index(where: str, answer: object, count: int) -> int:
    """Index of the right choice, given as a letter or an index."""
    index = -1
    if isinstance(answer, str) and len(answer.strip()) == 1:
        index = _LETTERS.find(answer.strip().upper())
    elif isinstance(answer, int) and not isinstance(answer, bool):
        index = answer
    if not 0 <= index < count:
        last = _LETTERS[min(count, len(_LETTERS)) - 1]
        raise RequestError(
            f"{where} has the answer {answer!r}: give a letter from A to {last}, or in JSON an "
            f"index from 0 to {count - 1}."
        )
    return index
