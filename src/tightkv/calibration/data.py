"""Text to calibrate on and to evaluate with: files, data sets, strings; cut into windows."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightkv.errors import RequestError
from tightkv.models import LoadedModel, one_line, render_chat

__all__ = [
    "MIN_TOKENS",
    "CalibrationText",
    "Document",
    "check_window",
    "cut_windows",
    "digest",
    "read_documents",
    "shuffled_pieces",
    "split_windows",
    "tokenize_document",
]

MIN_TOKENS = 64
_HELD_OUT = 4  # one token in so many
_CHARACTERS_PER_TOKEN = 4  # about, in English: so that a piece is about a window

Document = str | list[dict[str, Any]]
"""A text, or a conversation of `{"role": ..., "content": ...}`."""


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Windows of token ids.

    Attributes:
        measured: whose K and V make the scales.
        held_out: on which errors are measured, and choices made.
        sources: names of the files, or of what else the text is from.
        sha256: of all documents.
    """

    measured: list[list[int]]
    held_out: list[list[int]]
    sources: tuple[str, ...]
    sha256: str

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.measured))

    @property
    def num_held_out_tokens(self) -> int:
        return sum(map(len, self.held_out))


def read_documents(names: Sequence[str]) -> list[Document]:
    """Documents of `.txt` and `.jsonl` files (`messages`, `text` or `prompt`), or hub data sets.

    Raises:
        RequestError: names the file, and the line, and what is expected.
    """
    documents: list[Document] = []
    for name in names:
        path = Path(name).expanduser()
        if path.suffix == ".jsonl":
            documents += _read_json_lines(path)
        elif path.suffix == ".txt" or path.exists():
            documents.append(_read_text(path))
        else:
            documents += _read_data_set(name)
    return documents


def cut_windows(
    documents: Sequence[Document],
    model: LoadedModel,
    sources: Sequence[str],
    num_samples: int,
    max_seq_len: int,
    seed: int,
) -> CalibrationText:
    """Cut texts into pieces of about a window, shuffle, and join into windows of `max_seq_len`.

    The last quarter of the tokens is held out.

    Raises:
        RequestError: if there are too few tokens, or only special ones.
    """
    check_window(model, num_samples, max_seq_len)
    wanted = num_samples * max_seq_len
    tokens: list[int] = []
    for piece in shuffled_pieces(documents, max_seq_len, seed):
        if len(tokens) >= wanted:
            break
        tokens += tokenize_document(piece, model)
    return split_windows(tokens[:wanted], model, max_seq_len, tuple(sources), digest(documents))


def shuffled_pieces(documents: Sequence[Document], max_seq_len: int, seed: int) -> list[Document]:
    """Texts cut into pieces of about `max_seq_len` tokens, conversations whole; shuffled."""
    size = _CHARACTERS_PER_TOKEN * max_seq_len
    pieces = [piece for document in documents for piece in _pieces(document, size)]
    random.Random(seed).shuffle(pieces)
    return pieces


def tokenize_document(document: Document, model: LoadedModel) -> list[int]:
    """Token ids; a conversation in the words of the model's chat template."""
    is_text = isinstance(document, str)
    text = document if isinstance(document, str) else render_chat(model, document)
    ids: list[int] = model.tokenizer(text, add_special_tokens=is_text).input_ids
    return ids


def digest(documents: Iterable[Document]) -> str:
    """SHA-256 of all documents."""
    of_all = hashlib.sha256()
    for document in documents:
        data = document if isinstance(document, str) else json.dumps(document, sort_keys=True)
        of_all.update(f"{len(data)} ".encode() + data.encode("utf-8", "surrogatepass"))
    return of_all.hexdigest()


def check_window(model: LoadedModel, num_samples: int, max_seq_len: int) -> None:
    """Raise RequestError for windows that the model cannot read."""
    for name, value in (("num_samples", num_samples), ("max_seq_len", max_seq_len)):
        if value < 1:
            raise RequestError(f"{name} is {value}: it must be at least 1.")
    if max_seq_len > model.max_position:
        raise RequestError(
            f"max_seq_len is {max_seq_len}, but the model knows {model.max_position} positions: "
            "lower it."
        )


def split_windows(
    tokens: list[int],
    model: LoadedModel,
    max_seq_len: int,
    sources: tuple[str, ...],
    sha256: str,
) -> CalibrationText:
    """Windows of a text, the last quarter of it held out.

    Raises:
        RequestError: if there are too few tokens, or only special ones.
    """
    _check_tokens(tokens, model)
    split = len(tokens) - len(tokens) // _HELD_OUT
    return CalibrationText(
        measured=_chunks(tokens[:split], max_seq_len),
        held_out=_chunks(tokens[split:], max_seq_len),
        sources=sources,
        sha256=sha256,
    )


def _pieces(document: Document, size: int) -> Iterator[Document]:
    if isinstance(document, str):
        yield from (document[start : start + size] for start in range(0, len(document), size))
    else:
        yield document


def _check_tokens(tokens: Sequence[int], model: LoadedModel) -> None:
    if len(tokens) < MIN_TOKENS:
        raise RequestError(
            f"The calibration text has {len(tokens)} tokens: give at least {MIN_TOKENS}, better "
            "some thousand."
        )
    if set(tokens) <= set(model.tokenizer.all_special_ids):
        raise RequestError(
            "The calibration text has special tokens only: give text like that to be served."
        )


def _chunks(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"The text {path} cannot be read ({one_line(error)}): give a text file in "
            "UTF-8, or JSON lines."
        ) from error


def _read_json_lines(path: Path) -> list[Document]:
    return [
        _document(line, f"{path}, line {number}")
        for number, line in enumerate(_read_text(path).splitlines(), start=1)
        if line.strip()
    ]


def _document(line: str, where: str) -> Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is not JSON ({one_line(error)}): correct it.") from error
    return _of_record(record, where)


def _of_record(record: object, where: str) -> Document:
    """`messages` before `text` before `prompt`."""
    fields = record if isinstance(record, Mapping) else {"text": record}
    messages, text = fields.get("messages"), fields.get("text", fields.get("prompt"))
    if isinstance(messages, list) and all(isinstance(one, Mapping) for one in messages):
        return [dict(one) for one in messages]
    if isinstance(text, str):
        return text
    raise RequestError(
        f'{where} has neither "text" or "prompt" with a string nor "messages" with a list: '
        "correct it."
    )


def _read_data_set(name: str) -> list[Document]:
    """The split "train" of a hub data set, as the library `datasets` reads it."""
    if importlib.util.find_spec("datasets") is None:
        raise RequestError(
            f"There is no file {name}; to read a data set of that name from the hub, install the "
            "package datasets."
        )
    import datasets

    try:
        rows = datasets.load_dataset(name, split="train")
        return [_of_record(row, f"{name}, row {number}") for number, row in enumerate(rows)]
    except RequestError:
        raise
    except Exception as error:  # a library of many loaders
        raise RequestError(
            f"The data set {name!r} cannot be read ({one_line(error)}): check its name, or give a "
            "file."
        ) from error
