"""Shapes of a model are learned once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedConfig

import tightkv.capacity.facts
from tightkv.models.outline import outline_model


@pytest.fixture(autouse=True, scope="session")
def one_outline_per_config() -> Iterator[None]:
    made: dict[tuple[str, torch.dtype, torch.dtype], Any] = {}

    def outline(config: PreTrainedConfig, dtype: torch.dtype, packed: torch.dtype) -> Any:
        content = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"}
        key = (repr(sorted(content.items())), dtype, packed)
        if key not in made:
            made[key] = outline_model(config, dtype, packed)
        return made[key]

    with mock.patch.object(tightkv.capacity.facts, "outline_model", outline):
        yield
