"""Steps on a device: buffers that stay, memory measured by a trial, decodes captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from tightkv.config import EngineConfig
from tightkv.engine.accelerator import Accelerator, CudaAccelerator
from tightkv.engine.batch import Array, BatchArrays, place_batch
from tightkv.engine.device_batch import (
    DevicePlacement,
    ResultsBuffer,
    StagingBuffer,
    bucket_sizes,
    step_bytes,
)
from tightkv.engine.device_sampler import DeviceSampler, ScoredRow
from tightkv.engine.graphs import DecodeGraphs, empty_decode
from tightkv.engine.model_runner import ModelRunner
from tightkv.engine.runtime import AllocateCache, HostRuntime, Runtime, largest_step
from tightkv.engine.sampler import SamplingState
from tightkv.engine.sampling_params import SamplingParams
from tightkv.engine.scheduler import MAX_PROMPT_LOGPROBS_ROWS
from tightkv.engine.step_results import DeviceReader, LogitsReader
from tightkv.errors import InsufficientMemoryError
from tightkv.models import LoadedModel
from tightkv.planning import MemoryPlan, PoolRequest, format_bytes

__all__ = ["DeviceRuntime", "make_runtime"]

_BYTES_PER_GRAPH = 16 * 2**20
"""Of a captured step, besides its tensors: the driver's lists of launches. An estimate."""

_TRIAL_PARAMS = SamplingParams(temperature=1, top_p=0.9, logprobs=20)
"""What takes the most memory of a sampler, but for requests for the whole vocabulary."""


class DeviceRuntime:
    """A device with memory of its own.

    Attributes:
        device: the device.
        placement: sends steps there.
        reader: samples there, and fetches the results.
    """

    def __init__(
        self, config: EngineConfig, accelerator: Accelerator, reserved_bytes: int = 0
    ) -> None:
        """Look at the memory, before the weights load.

        Args:
            config: of the engine.
            accelerator: the device.
            reserved_bytes: left to others of this process.
        """
        self.device = accelerator.device
        self.placement: DevicePlacement
        self.reader: LogitsReader
        self._accelerator = accelerator
        self._config = config
        self._reserved_bytes = reserved_bytes
        self._at_start = accelerator.memory()
        self._request: PoolRequest | None = None
        self._results = ResultsBuffer(self.device, accelerator.pin)
        extras = StagingBuffer(self.device, accelerator.pin, 2**16, grows=True)
        self._sampler = DeviceSampler(self.device, extras)

    @contextmanager
    def watch(self, doing: str) -> Iterator[None]:
        """Turn torch's error into one that says what takes how much, and what to do.

        Raises:
            InsufficientMemoryError: when the device's memory runs out inside.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise InsufficientMemoryError(
                f"The memory of {self.device} ran out while {doing}: {'; '.join(self._terms())}. "
                "Three ways out: lower --gpu-memory-utilization, --max-num-seqs, "
                "--max-num-batched-tokens or --max-model-len; choose a narrower --kv-cache-dtype; "
                "or take a smaller model, or a GPU with more memory."
            ) from error

    def pool_request(
        self, config: EngineConfig, model: LoadedModel, allocate: AllocateCache
    ) -> PoolRequest:
        """Run the largest step with a cache of one block, and a decode as it will be captured."""
        scheduler, block_size = config.scheduler, config.cache.block_size
        num_tokens = largest_step(config, model)
        width = -(-(config.model.max_model_len or model.max_position) // block_size)
        cache = allocate(1)
        num_groups = len(cache.groups)
        num_bytes = step_bytes(num_tokens, scheduler.max_num_seqs, width, num_groups)
        staging = StagingBuffer(self.device, self._accelerator.pin, num_bytes)
        self.placement = DevicePlacement(staging, self.device, num_tokens, width)
        runner = ModelRunner(model, cache)
        queries = _shared_out(num_tokens, scheduler.max_num_seqs, width * block_size)
        largest = _trial_step(queries, width, block_size, num_groups)
        peak_bytes = self._peak_of(runner, largest)
        graph_bytes = 0
        if not config.device.enforce_eager:
            decode = self.placement.pad(empty_decode(num_groups), scheduler.max_num_seqs)
            graph_bytes = self._peak_of(runner, decode)
            graph_bytes += 4 * scheduler.max_num_seqs * model.vocab_size
            graph_bytes += _BYTES_PER_GRAPH * len(bucket_sizes(scheduler.max_num_seqs))
        del runner, cache
        self._accelerator.forget_peak()
        memory = self._accelerator.memory()
        others = memory.total - memory.free - memory.held
        self._request = PoolRequest(
            max_model_len=config.model.max_model_len,
            max_position=model.max_position,
            max_num_seqs=scheduler.max_num_seqs,
            max_chunk=num_tokens,
            total_bytes=memory.total - self._reserved_bytes,
            weight_bytes=model.weight_bytes,
            peak_bytes=peak_bytes,
            reserve_bytes=graph_bytes + others,
        )
        return self._request

    def get_ready(self, runner: ModelRunner, plan: MemoryPlan) -> None:
        """Bind the reader to the cache, and capture the decodes.

        Raises:
            UnsupportedModelError: if the model does what cannot be captured.
        """
        storage = runner.storage
        self.reader = DeviceReader(self._sampler, self._results, storage)
        self.placement.table_width = -(-plan.max_model_len // plan.block_size)
        if self._config.device.enforce_eager:
            return
        max_num_seqs = self._config.scheduler.max_num_seqs
        graphs = DecodeGraphs(max_num_seqs, runner.model.vocab_size, self.device)
        graphs.capture(runner.forward, self.placement, len(storage.groups), self._accelerator)
        runner.graphs = graphs

    @torch.inference_mode()
    def _peak_of(self, runner: ModelRunner, arrays: BatchArrays) -> int:
        """Bytes that a step takes at its peak, its sampling included."""
        self._accelerator.forget_peak()
        before = self._accelerator.memory().used
        num_rows = arrays.bucket or len(arrays.logit_rows)
        num_seqs = len(arrays.seq_lens)
        states = [SamplingState.create(_TRIAL_PARAMS, [0], seq) for seq in range(num_seqs)]
        rows = range(num_rows - num_seqs, num_rows)
        prompts = [ScoredRow(row, 0, _TRIAL_PARAMS.logprobs or 0) for row in range(rows.start)]
        plan = self._sampler.plan(list(zip(rows, states, strict=True)), prompts)
        batch = place_batch(arrays, self.placement, sampling=plan.arrays)
        logits = runner.forward(batch).float()
        self._results.fetch(self._sampler.start(plan, batch.sampling, logits))
        return self._accelerator.memory().peak - before

    def _terms(self) -> Iterator[str]:
        start, share = self._at_start, self._config.cache.gpu_memory_utilization
        yield f"it has {format_bytes(start.total)}, of which {format_bytes(start.free)} were free"
        yield f"{share:g} of all may be taken, {format_bytes(int(start.total * share))}"
        if self._request is not None:
            rest = int((self._request.total_bytes or 0) * share) - self._request.weight_bytes
            rest -= self._request.peak_bytes + self._request.reserve_bytes
            yield f"weights take {format_bytes(self._request.weight_bytes)}"
            yield f"the largest step {format_bytes(self._request.peak_bytes)}"
            reserve = format_bytes(self._request.reserve_bytes)
            yield f"graphs, libraries and other processes {reserve}"
            yield f"which leaves {format_bytes(max(rest, 0))} for the KV cache"


def make_runtime(
    config: EngineConfig,
    device: torch.device,
    accelerator: Accelerator | None,
    loaded: LoadedModel | None,
    reserved_bytes: int,
) -> Runtime:
    """Of the device: `accelerator`, if one is given, or by its type.

    Args:
        config: of the engine.
        device: where it runs.
        accelerator: the device's, if it is not torch's own.
        loaded: the model, if it is loaded already.
        reserved_bytes: memory that is left to others of this process.
    """
    if accelerator is None and device.type == "cpu":
        return HostRuntime(loaded, reserved_bytes)
    return DeviceRuntime(config, accelerator or CudaAccelerator(device), reserved_bytes)


def _shared_out(num_tokens: int, num_seqs: int, longest: int) -> Array:
    """Lengths of the queries of a step: as few prompts as there can be, and decodes."""
    queries = numpy.ones(num_seqs, numpy.int32)
    rest = num_tokens - num_seqs
    for seq in range(num_seqs):
        more = min(rest, longest - 1)
        queries[seq] += more
        rest -= more
    return queries


def _trial_step(queries: Array, table_width: int, block_size: int, num_groups: int) -> BatchArrays:
    """Sequences of the greatest length, with so many new tokens each, that write nothing.

    Each has one row of logits; the first one has rows for log-probabilities of its prompt besides.
    """
    num_tokens, num_seqs = int(queries.sum()), len(queries)
    num_prompt_rows = min(MAX_PROMPT_LOGPROBS_ROWS, int(queries[0]) - 1)
    last = queries.cumsum() - 1
    row_starts = numpy.arange(num_seqs + 1, dtype=numpy.int32)
    row_starts[1:] += num_prompt_rows
    ids = numpy.zeros(num_tokens, numpy.int64)
    return BatchArrays(
        input_ids=ids,
        positions=ids,
        slot_mappings=(ids - 1,) * num_groups,
        seq_lens=numpy.full(num_seqs, table_width * block_size, numpy.int32),
        query_start_loc=numpy.append(0, queries.cumsum()).astype(numpy.int32),
        block_tables=(numpy.zeros((num_seqs, table_width), numpy.int32),) * num_groups,
        logit_rows=numpy.append(numpy.arange(last[0] - num_prompt_rows, last[0]), last),
        row_start_loc=row_starts,
        max_query_len=int(queries.max()),
    )
