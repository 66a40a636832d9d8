"""Files that are whole or absent, and the folder for what is made once and kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tightkv.errors import OutputError

__all__ = ["atomic_file", "cache_folder", "check_folder", "check_target"]


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under `path` only when all of it is written.

    Raises:
        OutputError: if it cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror}): choose another."
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        # mkstemp lets nobody else read; a file made in the usual way would.
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_target(path: Path) -> None:
    """Notice before the work what would fail after it.

    Raises:
        OutputError: if `path` cannot be written.
    """
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise OutputError(
            f"{path} cannot be written: name a file in a folder that exists and may be written to."
        )


def check_folder(path: Path) -> Path:
    """The folder, made if it is not there.

    Raises:
        OutputError: if it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"The folder {path} cannot be made ({error.strerror}): choose another."
        ) from error
    if not os.access(path, os.W_OK):
        raise OutputError(f"The folder {path} cannot be written to: choose another.")
    return path


def cache_folder(kind: str) -> Path:
    """The folder `kind` in $TIGHTKV_CACHE_DIR, $XDG_CACHE_HOME/tightkv or ~/.cache/tightkv."""
    own = os.environ.get("TIGHTKV_CACHE_DIR")
    root = Path(own or os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (root if own else root / "tightkv") / kind
