"""Settings of every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread for tiny work, which waits longer for a second one than it takes; two for slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if request.node.get_closest_marker("slow") else 1)
    yield
    torch.set_num_threads(before)
