"""Files that are whole or absent; the cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightkv.errors import OutputError
from tightkv.files import atomic_file, cache_folder, check_target


def test_an_interrupted_file_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_file(path) as file:
            file.write(b"half of the new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_finished_file_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"), atomic_file(tmp_path / "no" / "x"):
        pass
    for target in (tmp_path, tmp_path / "no" / "x"):
        with pytest.raises(OutputError, match="cannot be written"):
            check_target(target)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTKV_CACHE_DIR", "/a")
    assert cache_folder("models") == Path("/a/models")
    monkeypatch.delenv("TIGHTKV_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder("models") == Path("/b/tightkv/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder("models") == Path("/home/someone/.cache/tightkv/models")
