"""What has been measured so far, kept in a file, so that an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tightkv.errors import OutputError, RequestError

__all__ = ["Journal"]

Value = TypeVar("Value")


class Journal:
    """Results by key, one JSON line each; a line that was cut short is measured again."""

    def __init__(self, path: Path | None, run: str) -> None:
        """Read what is there.

        Args:
            path: the file; None keeps results in memory alone.
            run: digest of all that decides the results.

        Raises:
            RequestError: if the file is of another run.
            OutputError: if it cannot be read or written.
        """
        self._path = path
        self._results: dict[str, Any] = {}
        if path is None:
            return
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else []
            self._read(lines, path, run)
            # Whole lines only, so that the next one does not go on where the last was cut.
            kept = [{"run": run}, *({"key": k, "value": v} for k, v in self._results.items())]
            path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
        except OSError as error:
            raise OutputError(
                f"{path} cannot be used ({error.strerror}): choose another --output-dir."
            ) from error

    @property
    def num_results(self) -> int:
        return len(self._results)

    def once(self, key: str, measure: Callable[[], Value]) -> Value:
        """The result under `key`, as JSON gives it back; measured if it is not there yet.

        Args:
            key: as "fidelity/prefill/0"; one key, one result.
            measure: makes it, out of what JSON knows.

        Raises:
            OutputError: if it cannot be written.
        """
        if key not in self._results:
            line = json.dumps({"key": key, "value": measure()})
            if self._path is not None:
                self._append(line)
            # As the file gives it back: tuples are lists, so that a resumed run sees the same.
            self._results[key] = json.loads(line)["value"]
        result: Value = self._results[key]
        return result

    def has(self, key: str) -> bool:
        return key in self._results

    def _append(self, line: str) -> None:
        assert self._path is not None
        try:
            with self._path.open("a") as file:
                file.write(f"{line}\n")
        except OSError as error:
            raise OutputError(
                f"{self._path} cannot be written ({error.strerror}): make room, and run the same "
                "command again; it goes on where it was."
            ) from error

    def _read(self, lines: list[bytes], path: Path, run: str) -> None:
        if not lines or not lines[0]:
            return
        records = [record for record in map(_parse, lines) if record is not None]
        if not records or records[0].get("run") != run:
            raise RequestError(
                f"{path} belongs to a run with other options, data or model: choose another "
                "--output-dir, or remove it."
            )
        self._results = {record["key"]: record["value"] for record in records[1:]}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
