"""Items of a task from a file, or from a data set of the hub."""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import io
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tightkv.errors import RequestError
from tightkv.models import one_line

__all__ = ["Record", "Records", "choose", "digest_of", "read_csv", "read_hub", "read_json_lines"]

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a file, or one row of a data set.

    Attributes:
        fields: by name; of a CSV file by the number of the column, from 0.
        where: file and line, for messages.
    """

    fields: Mapping[Any, Any]
    where: str

    def text(self, name: str) -> str:
        """The string `name`.

        Raises:
            RequestError: if it is missing, no string, or empty.
        """
        value = self.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise RequestError(f'{self.where} has no text under "{name}": correct it.')
        return value


@dataclass(frozen=True, slots=True)
class Records:
    """What was read, and the digest of it."""

    entries: tuple[Record, ...]
    sha256: str


def choose(entries: Sequence[Entry], limit: int | None, seed: int) -> list[tuple[str, Entry]]:
    """The first `limit` of the shuffled entries (None or 0: all), each with its number from 0."""
    numbered = [(str(index), entry) for index, entry in enumerate(entries)]
    random.Random(seed).shuffle(numbered)
    return numbered[: limit or None]


def digest_of(*parts: object) -> str:
    """Of values that JSON knows."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def read_json_lines(path: Path) -> Records:
    """Objects of a `.jsonl` or `.jsonl.gz` file.

    Raises:
        RequestError: names file and line.
    """
    data = _read(path)
    entries = []
    # Not splitlines, which also splits at characters that JSON allows inside a string.
    for number, line in enumerate(_decoded(data, path).split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            entries.append(Record(_json_object(line, where), where))
    return _whole(entries, data, path)


def read_csv(path: Path) -> Records:
    """Rows of a CSV file without a header.

    Raises:
        RequestError: names file and line.
    """
    data = _read(path)
    reader = csv.reader(io.StringIO(_decoded(data, path), newline=""), strict=True)
    entries = []
    try:
        entries = [
            Record(dict(enumerate(row)), f"{path}, line {reader.line_num}") for row in reader if row
        ]
    except csv.Error as error:
        raise RequestError(
            f"{path}, line {reader.line_num} is not CSV ({one_line(error)}): correct it."
        ) from error
    return _whole(entries, data, path)


def read_hub(name: str, subset: str | None, split: str) -> Records:
    """Rows of a hub data set, as the library `datasets` reads it.

    Raises:
        RequestError: if it is not installed, or the data set cannot be had.
    """
    if importlib.util.find_spec("datasets") is None:
        raise RequestError(
            f"To fetch {name} from the hub, install the package datasets; or name a file, as "
            "gsm8k=FILE."
        )
    import datasets

    try:
        rows = [dict(row) for row in datasets.load_dataset(name, subset, split=split)]
    except Exception as error:  # a library of many loaders
        raise RequestError(
            f"The data set {name} cannot be fetched from the hub ({one_line(error)}): name a file, "
            "as gsm8k=FILE, or try again when online."
        ) from error
    entries = [Record(row, f"{name}, {split}, row {number}") for number, row in enumerate(rows)]
    return Records(tuple(entries), digest_of(rows))


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise RequestError(
            f"The file {path} cannot be read ({one_line(error)}): check the name after the =."
        ) from error


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 ({one_line(error)}): convert it.") from error


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is not JSON ({one_line(error)}): correct it.") from error
    if not isinstance(value, dict):
        raise RequestError(f"{where} is not a JSON object: correct it.")
    return value


def _whole(entries: Sequence[Record], data: bytes, path: Path) -> Records:
    if not entries:
        raise RequestError(f"{path} is empty: give a file with items.")
    return Records(tuple(entries), hashlib.sha256(data).hexdigest())
