"""Where steps run, and what that asks of the engine; on the host that is little."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import torch

from tightkv.config import EngineConfig
from tightkv.engine.batch import HOST, Placement
from tightkv.engine.model_runner import ModelRunner
from tightkv.engine.scheduler import MAX_PROMPT_LOGPROBS_ROWS
from tightkv.engine.step_results import HostReader, LogitsReader
from tightkv.kvcache import KVCacheStorage
from tightkv.models import LoadedModel, peak_activation_bytes
from tightkv.planning import MemoryPlan, PoolRequest, available_memory

__all__ = ["AllocateCache", "HostRuntime", "Runtime", "largest_step"]

AllocateCache = Callable[[int], KVCacheStorage]
"""Makes a cache of so many blocks."""


class Runtime(Protocol):
    """What an engine uses, in this order: while it starts, then in each step."""

    @property
    def device(self) -> torch.device:
        """Where the model and its cache lie."""

    def watch(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Say where the memory is if it runs out inside, while `doing` something."""

    def pool_request(
        self, config: EngineConfig, model: LoadedModel, allocate: AllocateCache
    ) -> PoolRequest:
        """What the pool's size is planned from."""

    def get_ready(self, runner: ModelRunner, plan: MemoryPlan) -> None:
        """Do what is done once, when the cache is there."""

    @property
    def placement(self) -> Placement:
        """Brings steps to the device."""

    @property
    def reader(self) -> LogitsReader:
        """Makes tokens of logits."""


class HostRuntime:
    """The CPU.

    Attributes:
        device: the CPU.
        placement: leaves a step's arrays where they are.
        reader: reads the logits where they are.
    """

    def __init__(self, loaded: LoadedModel | None, reserved_bytes: int) -> None:
        """Look at the memory before the weights load; a `loaded` model has taken its part."""
        self.device = torch.device("cpu")
        self.placement: Placement = HOST
        self.reader: LogitsReader = HostReader()
        self._total_bytes = available_memory()
        if self._total_bytes is not None:
            self._total_bytes += (loaded.weight_bytes if loaded else 0) - reserved_bytes

    def watch(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def pool_request(
        self, config: EngineConfig, model: LoadedModel, allocate: AllocateCache
    ) -> PoolRequest:
        num_tokens, max_num_seqs = largest_step(config, model), config.scheduler.max_num_seqs
        return PoolRequest(
            max_model_len=config.model.max_model_len,
            max_position=model.max_position,
            max_num_seqs=max_num_seqs,
            max_chunk=num_tokens,
            total_bytes=self._total_bytes,
            weight_bytes=model.weight_bytes,
            peak_bytes=peak_activation_bytes(
                model, num_tokens, max_num_seqs, MAX_PROMPT_LOGPROBS_ROWS
            ),
        )

    def get_ready(self, runner: ModelRunner, plan: MemoryPlan) -> None:
        """Nothing is to be done."""


def largest_step(config: EngineConfig, model: LoadedModel) -> int:
    """Tokens of the largest step: a whole prompt may be longer than the budget."""
    scheduler = config.scheduler
    if scheduler.enable_chunked_prefill:
        return scheduler.max_num_batched_tokens
    longest = config.model.max_model_len or model.max_position
    return max(scheduler.max_num_batched_tokens, longest + scheduler.max_num_seqs)
