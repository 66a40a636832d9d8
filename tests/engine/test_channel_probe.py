"""Channel factors from random tokens: the default of int8."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tightkv import LLM
from tightkv.files import cache_folder
from tiny_models import save_tiny_model

POOL = {"kv_cache_memory_bytes": 1 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTKV_CACHE_DIR", str(tmp_path))


def factors(folder: Path, **options: object) -> list[torch.Tensor]:
    storage = LLM(str(folder), kv_cache_dtype="int8", **POOL, **options).engine.storage
    found = [f for i in (0, 1) for f in (storage.layer(i).k_scale, storage.layer(i).v_scale)]
    return [f for f in found if f is not None]


def test_int8_alone_takes_factors_of_a_probe(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tightkv")
    found = factors(folder)
    assert len(found) == 4
    assert all(len(set(f.flatten().tolist())) > 10 for f in found), "factors of each channel"
    assert "layers 0-1: probe" in caplog.text
    assert "tightkv calibrate" in caplog.text


def test_the_probe_is_kept_and_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = factors(folder)
    (kept,) = cache_folder("probes").iterdir()
    assert kept.name.endswith("-float32-512-1.safetensors")

    def must_not_run(*_: object) -> None:
        raise AssertionError("measured twice")

    monkeypatch.setattr("tightkv.engine.channel_probe._measure", must_not_run)
    assert all(map(torch.equal, first, factors(folder)))


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_a_broken_file_is_measured_anew(folder: Path, content: bytes) -> None:
    first = factors(folder)
    (kept,) = cache_folder("probes").iterdir()
    kept.write_bytes(content)
    assert all(map(torch.equal, first, factors(folder)))
    assert len(kept.read_bytes()) > len(content)


def test_a_folder_that_cannot_be_used_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIGHTKV_CACHE_DIR", str(tmp_path / "file"))
    assert len(factors(folder)) == 4
    assert "cannot be kept" in caplog.text


def test_nothing_is_probed_where_nothing_wants_it(folder: Path) -> None:
    for options in (
        {"kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": ("0-1",)},
    ):
        LLM(str(folder), **POOL, **options)
    assert not cache_folder("probes").exists()
    storage = LLM(
        str(folder), k_cache_dtype="int8", v_cache_dtype="fp8_e5m2", **POOL
    ).engine.storage
    assert storage.layer(0).k_scale is not None
    assert storage.layer(0).v_scale is None
