"""Settings of every test."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

# Triton asks once, at its import, whether its interpreter shall run the kernels; some tests import
# what imports it. With a GPU the tests of its kernels run there.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny work waits longer for a second thread than it takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """The command line logs to the standard error of its test, which is closed after it."""
    logger = logging.getLogger("tightkv")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines keep for the next start is not kept in the home of who runs the tests."""
    folder = str(tmp_path_factory.mktemp("cache"))
    with mock.patch.dict(os.environ, {"TIGHTKV_CACHE_DIR": folder}):
        yield
