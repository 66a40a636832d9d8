"""An engine without a model: scheduler, cache manager and swap space are the real ones."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from tightkv.config import SchedulerConfig
from tightkv.engine.detokenizer import IncrementalDetokenizer
from tightkv.engine.preemption import Swapping
from tightkv.engine.sampler import SamplingState
from tightkv.engine.sampling_params import SamplingParams
from tightkv.engine.scheduler import ScheduledChunk, Scheduler
from tightkv.engine.sequence import Sequence
from tightkv.formats.registry import resolve_format
from tightkv.kernels.ops import ReferenceBackend
from tightkv.kvcache import (
    KVCacheManager,
    KVCacheSpec,
    KVCacheStorage,
    SwappingKVCacheManager,
    group_layers,
)
from tightkv.kvcache.swap_costs import SwapCosts
from tightkv.kvcache.swap_memory import SwapFile, SwapMemory
from tightkv.kvcache.swap_space import SwapSpace
from tightkv.metrics import EngineStats

PARAMS = SamplingParams(detokenize=False)
_NO_TOKENIZER = cast(PreTrainedTokenizerBase, None)  # PARAMS ask for none


class ModellessEngine:
    """What `LLMEngine` does around the scheduler; every step's tokens are drawn.

    Attributes:
        unfinished: sequences by the name of their request.
        storage: real blocks, of one small layer for each window.
        seconds: what scheduler and cache manager took of the last step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        *,
        windows: tuple[int | None, ...] = (None,),
        block_size: int = 16,
        prefix_caching: bool = True,
        max_chunk: int | None = None,
        num_slots: int = 0,
        kind: type[Scheduler] = Scheduler,
    ) -> None:
        """Start with all blocks free.

        Args:
            config: of the scheduler.
            num_blocks: of the pool, from which all groups take.
            windows: of each layer group.
            block_size: tokens per block.
            prefix_caching: whether requests share blocks.
            max_chunk: tokens of the largest chunk; default: `max_num_batched_tokens`.
            num_slots: of the swap space, to which every preempted sequence goes; 0: there is none.
            kind: the scheduler.
        """
        self.config = config
        self.stats = EngineStats()
        self.storage = _small_storage(windows, block_size, num_blocks)
        arguments: dict[str, Any] = {
            "windows": [group.sliding_window for group in self.storage.groups],
            "num_blocks": num_blocks,
            "block_size": block_size,
            "seed": b"",
            "enable_prefix_caching": prefix_caching,
            "max_chunk": max_chunk or config.max_num_batched_tokens,
        }
        self.manager: KVCacheManager
        self.swap_space: SwapSpace | None = None
        preemption = None
        if num_slots:
            memory = self.open_memory(num_slots * self.storage.groups[0].page_bytes)
            costs = SwapCosts(ignores_costs=True)
            self.swap_space = SwapSpace(memory, self.storage, costs, self.stats)
            self.manager = SwappingKVCacheManager(swap_space=self.swap_space, **arguments)
            preemption = Swapping("swap", self.manager, self.stats)
        else:
            self.manager = KVCacheManager(**arguments)
        self.scheduler = kind(config, self.manager, self.stats, preemption)
        self.unfinished: dict[str, list[Sequence]] = {}
        self.seconds = 0.0
        self._shares = prefix_caching
        self._random = random.Random(0)

    def open_memory(self, num_bytes: int) -> SwapMemory:
        """The bytes of the swap space."""
        return SwapFile(Path(tempfile.gettempdir()), num_bytes)

    def add(
        self, request: str, prompt: list[int], max_tokens: int, *, n: int = 1, priority: int = 0
    ) -> list[Sequence]:
        """Queue a request."""
        sequences: list[Sequence] = []
        for index in range(n):
            sequences.append(
                Sequence(
                    seq_id=f"{request}/{index}",
                    request_id=request,
                    index=index,
                    params=PARAMS,
                    prompt_len=len(prompt),
                    token_ids=list(prompt),
                    max_tokens=max_tokens,
                    sampling=SamplingState.create(PARAMS, prompt, 0),
                    detokenizer=IncrementalDetokenizer(_NO_TOKENIZER, prompt, PARAMS),
                    hasher=self.manager.new_hasher(request),
                    leader=sequences[0] if index else None,
                )
            )
            self.scheduler.add(sequences[-1], priority)
        self.unfinished[request] = sequences
        return sequences

    def step(self) -> list[ScheduledChunk]:
        """One step of the engine."""
        begin = time.perf_counter()
        chunks = self.scheduler.schedule()
        scheduled = time.perf_counter()
        for chunk in chunks:
            self.compute(chunk)
        computed = time.perf_counter()
        self.settle(chunks)
        self.seconds = scheduled - begin + time.perf_counter() - computed
        return chunks

    def compute(self, chunk: ScheduledChunk) -> None:
        """What the model and the sampler do."""
        sequence, completes = chunk.sequence, chunk.completes
        sequence.num_computed_tokens += chunk.num_tokens
        if completes:
            sequence.token_ids.append(self.next_token(sequence))
            if sequence.num_output_tokens >= sequence.max_tokens:
                sequence.finish("length")

    def next_token(self, sequence: Sequence) -> int:
        """What the sampler would say."""
        return self._random.randrange(50_000)

    def settle(self, chunks: Collection[ScheduledChunk]) -> None:
        """Offer new blocks to others, let go of what has finished."""
        for sequence in (chunk.sequence for chunk in chunks):
            request = self.unfinished[sequence.request_id]
            if self._shares or len(request) > 1:
                self.manager.remember_blocks(
                    sequence.seq_id, sequence.token_ids, sequence.num_computed_tokens
                )
            if sequence.is_finished:
                self.scheduler.release(sequence)
        for name in {chunk.sequence.request_id for chunk in chunks}:
            if all(sequence.is_finished for sequence in self.unfinished[name]):
                del self.unfinished[name]


def _small_storage(
    windows: tuple[int | None, ...], block_size: int, num_blocks: int
) -> KVCacheStorage:
    """8 bytes of K and 64 of V for each token in each group."""
    narrow = resolve_format("float32", torch.float32)
    specs = [
        KVCacheSpec(
            layer_idx=layer_idx,
            block_size=block_size,
            num_kv_heads=1,
            head_size=1,
            value_size=1,
            k_format=narrow,
            v_format=narrow,
            sliding_window=window,
        )
        for layer_idx, window in enumerate(windows)
    ]
    return KVCacheStorage(group_layers(specs), num_blocks, torch.device("cpu"), ReferenceBackend())
