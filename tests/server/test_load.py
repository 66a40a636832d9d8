"""Short forms of load.py and soak.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from live_server import live_server
from server.load import check, make_tasks, pool_bytes, run_load
from server.soak import soak
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def test_load(folder: Path) -> None:
    longest, num_requests = 96, 300
    with live_server(
        folder,
        kv_cache_dtype="int8",
        max_num_seqs=64,
        max_model_len=longest,
        kv_cache_memory_bytes=pool_bytes(str(folder), "int8", 8 * longest),
    ) as server:
        # So that some are preempted.
        server.call(lambda engine: setattr(engine.scheduler, "num_reserved_tokens", 0))
        tasks = make_tasks(256, 20, 64, 32)
        report = asyncio.run(run_load(server.url, tasks, 64, num_requests))
        check(server, report, num_requests)
        assert report.num_left > 0
        assert server.serving.engine.latest_snapshot().stats.num_preemptions > 0


@pytest.mark.slow
def test_memory_stays(folder: Path) -> None:
    sizes = soak(str(folder), 30, 16, "--kv-cache-dtype", "int8", "--kv-cache-memory-bytes", "4M")
    assert len(sizes) > 3, "too slow to tell"
    settled = sizes[len(sizes) // 2]
    assert sizes[-1] - settled < 16 * 2**20, sizes
