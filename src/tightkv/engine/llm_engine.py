"""The engine: the only class that sees requests, scheduler, cache and model at once."""

from __future__ import annotations

import hashlib
import operator
import random
import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tightkv.config import CacheConfig, EngineConfig
from tightkv.engine.accelerator import Accelerator
from tightkv.engine.batch import build_forward_batch
from tightkv.engine.channel_probe import probe_factors
from tightkv.engine.clip_watch import ClipWatch
from tightkv.engine.detokenizer import IncrementalDetokenizer
from tightkv.engine.device_runtime import make_runtime
from tightkv.engine.devices import log_device, resolve_device
from tightkv.engine.grammar import GrammarCompiler
from tightkv.engine.model_runner import ModelRunner
from tightkv.engine.output_processor import LogitsObserver, OutputProcessor
from tightkv.engine.outputs import FinishReason
from tightkv.engine.policy import (
    PolicySources,
    log_sources,
    probed_layers,
    resolve_policy,
    scales_of,
    with_probe,
)
from tightkv.engine.preemption import Preemption, Recomputation, Swapping
from tightkv.engine.request import Request
from tightkv.engine.resolve import (
    check_config,
    check_swap_size,
    log_plan,
    resolve_config,
    resolve_specs,
)
from tightkv.engine.sampler import SamplingState
from tightkv.engine.sampling_params import SamplingParams
from tightkv.engine.scheduler import ScheduledChunk, Scheduler
from tightkv.engine.sequence import Sequence
from tightkv.errors import EngineError, IntegrityError, PromptTooLongError, RequestError
from tightkv.formats import KVCachePolicy
from tightkv.formats.registry import dtype_name
from tightkv.kernels import Backend, select_backend
from tightkv.kvcache import (
    KVCacheManager,
    KVCacheStorage,
    LayerGroup,
    SwappingKVCacheManager,
    are_alike,
    group_layers,
)
from tightkv.kvcache.swap_costs import SwapCosts
from tightkv.kvcache.swap_memory import GIB, SwapMemory, open_swap_memory
from tightkv.kvcache.swap_space import SwapSpace
from tightkv.metrics import EngineStats
from tightkv.models import (
    Checkpoint,
    LoadedModel,
    ModelGeometry,
    geometry_without_weights,
    load_model,
    one_line,
    prepare_model,
)
from tightkv.planning import available_memory, plan_memory

__all__ = ["LLMEngine"]


class LLMEngine:
    """Takes requests, runs steps. Not thread-safe: one thread adds, steps and aborts.

    Attributes:
        config: what is served; nothing in it is "auto".
        model: the model, which other engines of the same thread may share.
        policy: formats and scales of each layer.
        pool_request: what the pool's size was planned from.
        plan: the pool.
        stats: counters since the start.
        swap_space: where the blocks of preempted sequences go; None: nowhere.
        grammars: what `structured_outputs` are compiled by; other threads may use it, too.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: LoadedModel | None = None,
        backend: Backend | None = None,
        reserved_bytes: int = 0,
        accelerator: Accelerator | None = None,
    ) -> None:
        """Load the model (unless one is given), size the pool, allocate the cache.

        Args:
            config: what is asked for.
            model: loaded already; other engines may share it.
            backend: the kernels; default: those of the device.
            reserved_bytes: memory that the plan leaves to others of this process.
            accelerator: the device, in place of the configuration's.

        Raises:
            ConfigError: for settings that contradict each other or the model.
            CheckpointError: if the model cannot be read.
            InsufficientMemoryError: if the cache does not fit.
        """
        check_config(config)
        device = accelerator.device if accelerator else resolve_device(config.device)
        self.device = device
        self._backend = backend or select_backend(device)
        # Before the memory is looked at: on a tmpfs or pinned, swap space takes of it.
        swap_memory = self._open_swap_memory(config.cache, device)
        runtime = make_runtime(config, device, accelerator, model, reserved_bytes)
        sources = PolicySources.read(config.cache)
        with runtime.watch("the weights were loaded"):
            self.model = model or load_model(
                config.model,
                device,
                lambda known: _check_cache(config.cache, sources, known, swap_memory),
            )
            geometry = prepare_model(self.model.model)
        with runtime.watch("the largest step was tried"):
            self.policy = self._decide_policy(config, geometry, sources)
            groups = group_layers(
                resolve_specs(self.policy, geometry, config.cache.block_size, self.model.dtype)
            )
            allocate = partial(self._allocate, groups, geometry, device)
            self.pool_request = runtime.pool_request(config, self.model, allocate)
        self.plan = plan_memory(groups, config.cache, self.pool_request)
        self.config = resolve_config(config, self.plan, self.policy, dtype_name(self.model.dtype))
        log_device(config.device, device)
        log_plan(device, self.plan, groups, f"{self._backend.name} ({self._backend.reason})")
        with runtime.watch("the KV cache was allocated"):
            self.storage = allocate(self.plan.num_blocks)
        self._runner = ModelRunner(self.model, self.storage)
        with runtime.watch("decodes were captured"):
            runtime.get_ready(self._runner, self.plan)
        self._placement = runtime.placement
        self.stats = EngineStats()
        self.swap_space = self._make_swap_space(swap_memory)
        self.manager, preemption = self._make_manager(groups)
        if config.cache.debug_integrity:
            self.manager.poison_with(self.storage.poison)
        self.scheduler = Scheduler(self.config.scheduler, self.manager, self.stats, preemption)
        self._clip_watch = ClipWatch(self.storage)
        self._processor = OutputProcessor(
            self.model.tokenizer, self.model.eos_token_ids, runtime.reader
        )
        self.grammars = GrammarCompiler(
            self.model.tokenizer, self.model.vocab_size, self.model.eos_token_ids
        )
        self._requests: dict[str, Request] = {}
        self._num_added = 0

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_work

    @property
    def requests(self) -> tuple[Request, ...]:
        """The unfinished requests, oldest first."""
        return tuple(self._requests.values())

    def observe_logits(self, observer: LogitsObserver | None) -> None:
        """Let `observer` see the logits from which each token is taken (evaluation).

        It sees those of prompts with `prompt_logprobs`, too, which are then not made:
        log-probabilities of a large vocabulary take longer than the model.
        """
        self._processor.observer = observer

    def add_request(
        self,
        request_id: str,
        prompt: str | Seq[int],
        params: SamplingParams,
        prompt_text: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Request:
        """Queue a request.

        Args:
            request_id: a name that no unfinished request has.
            prompt: text, or token ids.
            params: how to answer.
            prompt_text: the text of a prompt given as token ids, for the output.
            cache_salt: requests share prefixes only with those of the same salt.
            priority: the lower, the earlier; other than 0 with `scheduling_policy` "priority".

        Raises:
            RequestError: if it can never be served; nothing is queued.
        """
        if request_id in self._requests:
            raise RequestError(
                f"Request id {request_id!r} is in use by an unfinished request: choose another."
            )
        if isinstance(prompt, str):
            prompt_text, token_ids = prompt, self.tokenize(prompt)
        else:
            token_ids = _as_ints(prompt)
        self._check_prompt(token_ids, params)
        self._check_priority(priority)
        params.check_against_vocabulary(self.model.vocab_size, self.model.eos_token_ids)
        request = self._make_request(request_id, prompt_text, token_ids, params, cache_salt)
        self._requests[request_id] = request
        for sequence in request.sequences:
            self.scheduler.add(sequence, priority)
        return request

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self.model.tokenizer(text, add_special_tokens=add_special_tokens).input_ids
        return ids

    def abort_request(self, request_id: str) -> None:
        """End a request and free its blocks; an unknown or finished one is left alone."""
        self._end(request_id, "abort")

    def step(self) -> list[Request]:
        """Run one step.

        Returns:
            The requests that took part. Finished ones are forgotten by the engine.

        Raises:
            EngineError: if the step failed; its requests have ended with an error.
            IntegrityError: with `debug_integrity`, if blocks or sequences are in disorder.
        """
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        self._count(chunks)
        try:
            sampling = self._processor.prepare(chunks)
            batch = build_forward_batch(chunks, self.manager, self._placement, sampling)
            begin = time.perf_counter()
            self._processor.process(batch, self._runner.execute(batch))
            self._note_speed(chunks, time.perf_counter() - begin)
        except Exception as error:
            raise self._fail(chunks, error) from error
        settled = self._settle(chunks)
        if self.config.cache.debug_integrity:
            self.check_integrity()
        rates = self._clip_watch.after_step(is_idle=not self.scheduler.has_work)
        if rates is not None:
            self.stats.clip_rates = rates
        return settled

    def check_integrity(self) -> None:
        """Raise IntegrityError if pool, block tables, prefix cache and sequences contradict."""
        try:
            self.manager.check_integrity()
            self.scheduler.check_integrity()
        except AssertionError as error:
            raise IntegrityError(
                f"The engine's notes about its KV cache contradict each other ({error}): restart "
                "it, and report what it served."
            ) from error

    def _fail(self, chunks: Seq[ScheduledChunk], error: Exception) -> EngineError:
        """End the requests of a step that broke, so that it is not run again and again."""
        reason = f"A step of the engine failed ({one_line(error)}): its requests have ended."
        for chunk in chunks:
            self._end(chunk.sequence.request_id, "error", EngineError(reason))
        return EngineError(reason)

    def _end(self, request_id: str, reason: FinishReason, error: EngineError | None = None) -> None:
        """Finish what is unfinished of a request, and free its blocks."""
        request = self._requests.pop(request_id, None)
        for sequence in request.sequences if request else ():
            if not sequence.is_finished:
                sequence.finish(reason, error=error)
            # Also a finished one: its step may have been interrupted before it was released.
            self.scheduler.release(sequence)

    def _settle(self, chunks: Seq[ScheduledChunk]) -> list[Request]:
        """Offer checked blocks to others, free what is finished."""
        touched: dict[str, Request] = {}
        for sequence in (chunk.sequence for chunk in chunks):
            request = self._requests[sequence.request_id]
            touched[request.request_id] = request
            # What nobody can ask for is not remembered: its blocks are reused at once.
            is_shared = self.config.cache.enable_prefix_caching or len(request.sequences) > 1
            if is_shared and sequence.finish_reason != "error":
                self.manager.remember_blocks(
                    sequence.seq_id,
                    sequence.token_ids,
                    sequence.num_computed_tokens,
                )
            if sequence.is_finished:
                self.scheduler.release(sequence)
        for request in touched.values():
            if request.is_finished:
                del self._requests[request.request_id]
        return list(touched.values())

    def _count(self, chunks: Seq[ScheduledChunk]) -> None:
        self.stats.num_steps += 1
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.completes:
                self.stats.generation_tokens += 1
            begin = sequence.num_computed_tokens
            self.stats.prompt_tokens += max(
                0, min(begin + chunk.num_tokens, sequence.prompt_len) - begin
            )

    def _note_speed(self, chunks: Seq[ScheduledChunk], seconds: float) -> None:
        """Tell the swap space how fast prompts are: of steps in which most tokens are theirs."""
        if self.swap_space is None:
            return
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if num_tokens > 2 * len(chunks):
            self.swap_space.costs.prefill.note(num_tokens, seconds)

    def _check_prompt(self, token_ids: Seq[int], params: SamplingParams) -> None:
        limit = self.plan.max_model_len
        if not token_ids:
            raise RequestError("The prompt has no tokens: send at least one.")
        wrong = [token for token in token_ids if not 0 <= token < self.model.vocab_size]
        if wrong:
            raise RequestError(
                f"The prompt has token id {wrong[0]}: ids go from 0 to {self.model.vocab_size - 1}."
            )
        if len(token_ids) >= limit:
            raise PromptTooLongError(
                f"The prompt has {len(token_ids)} tokens, but prompt and answer together may have "
                f"{limit}: shorten it, or raise --max-model-len or the KV cache's memory."
            )
        forced = params.forced_token_ids
        if forced is not None and len(token_ids) + len(forced) > limit:
            raise PromptTooLongError(
                f"The prompt's {len(token_ids)} tokens and {len(forced)} forced ones are more than "
                f"the {limit} that may be served: shorten them."
            )

    def _check_priority(self, priority: int) -> None:
        if priority != 0 and self.config.scheduler.scheduling_policy == "fcfs":
            raise RequestError(
                f"priority is {priority}, but requests are served as they come: leave it out, or "
                "start with --scheduling-policy priority."
            )

    def _make_request(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        cache_salt: str,
    ) -> Request:
        form = params.structured_outputs
        grammars = [self.grammars.compile(form) if form else None for _ in range(params.n)]
        self._num_added += 1
        default_seed = random.Random(f"{self.config.scheduler.seed}/{self._num_added}").getrandbits(
            32
        )
        room = self.plan.max_model_len - len(token_ids)
        sequences: list[Sequence] = []
        for index, grammar in enumerate(grammars):
            sequences.append(
                Sequence(
                    seq_id=f"{request_id}/{index}",
                    request_id=request_id,
                    index=index,
                    params=params,
                    prompt_len=len(token_ids),
                    token_ids=list(token_ids),
                    max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                    sampling=SamplingState.create(
                        params,
                        token_ids,
                        default_seed,
                        self.model.eos_token_ids,
                        index=index,
                        grammar=grammar,
                    ),
                    detokenizer=IncrementalDetokenizer(self.model.tokenizer, token_ids, params),
                    hasher=self.manager.new_hasher(str(self._num_added), cache_salt),
                    leader=sequences[0] if index else None,
                )
            )
        return Request(request_id, prompt, tuple(token_ids), tuple(sequences))

    def _decide_policy(
        self, config: EngineConfig, geometry: ModelGeometry, sources: PolicySources
    ) -> KVCachePolicy:
        """Formats and scales of every layer, those of a probe too."""
        sources = replace(sources, checkpoint=self.model.kv_scales)
        sources.check_identity(self.model.identity)
        policy: KVCachePolicy = resolve_policy(config.cache, geometry, sources)
        if probed_layers(policy):
            longest = config.model.max_model_len or self.model.max_position
            device = self.model.model.device
            factors = probe_factors(self.model, geometry, self._backend, device, longest)
            policy = with_probe(policy, factors)
        log_sources(policy, sources)
        return policy

    def _cache_seed(self) -> bytes:
        """Differs whenever equal tokens would have other bytes in the cache."""
        identity = self.model.identity
        facts = f"{identity.architecture} {identity.weights} {self.model.dtype}"
        return hashlib.sha256(facts.encode() + self.storage.fingerprint()).digest()

    def _open_swap_memory(self, cache: CacheConfig, device: torch.device) -> SwapMemory | None:
        if cache.swap_space == 0:
            return None
        whole, part = divmod(cache.swap_space, 1)
        num_bytes = int(whole) * GIB + int(part * GIB)  # in one product 1e300 GiB would overflow
        return open_swap_memory(num_bytes, cache.swap_dir, device, available_memory())

    def _make_swap_space(self, memory: SwapMemory | None) -> SwapSpace | None:
        if memory is None:
            return None
        costs = SwapCosts(ignores_costs=self.config.scheduler.preemption_mode == "swap")
        return SwapSpace(memory, self.storage, costs, self.stats)

    def _make_manager(self, groups: tuple[LayerGroup, ...]) -> tuple[KVCacheManager, Preemption]:
        cache = self.config.cache
        arguments: dict[str, Any] = {
            "windows": [group.sliding_window for group in groups],
            "num_blocks": self.plan.num_blocks,
            "block_size": cache.block_size,
            "seed": self._cache_seed(),
            "enable_prefix_caching": cache.enable_prefix_caching,
            "max_chunk": self.pool_request.max_chunk,
            "clear": None if are_alike(groups) else self.storage.clear,
        }
        if self.swap_space is None:
            manager = KVCacheManager(**arguments)
            return manager, Recomputation(manager, self.stats)
        swapping = SwappingKVCacheManager(**arguments, swap_space=self.swap_space)
        mode = self.config.scheduler.preemption_mode
        return swapping, Swapping(mode, swapping, self.stats)

    def _allocate(
        self,
        groups: tuple[LayerGroup, ...],
        geometry: ModelGeometry,
        device: torch.device,
        num_blocks: int,
    ) -> KVCacheStorage:
        scales = scales_of(self.policy)
        return KVCacheStorage(
            groups, num_blocks, device, self._backend, scales, geometry.kv_sources
        )


def _check_cache(
    cache: CacheConfig,
    sources: PolicySources,
    known: Checkpoint,
    swap_memory: SwapMemory | None,
) -> None:
    """Refuse scales that do not fit, and a swap space for less than a block, before weights load.

    The engine checks both again after it.
    """
    sources = replace(sources, checkpoint=known.kv_scales)
    sources.check_identity(known.identity)
    has_scales = sources.path or cache.kv_cache_scales or cache.kv_cache_dtype_skip_layers
    if not has_scales and swap_memory is None:
        return
    geometry = geometry_without_weights(known.config)
    if geometry is None:
        return
    policy = resolve_policy(cache, geometry, sources)
    if swap_memory is not None:
        check_swap_size(swap_memory.num_bytes, policy, geometry, cache.block_size)


def _as_ints(token_ids: Seq[int]) -> list[int]:
    try:
        return [operator.index(token) for token in token_ids]
    except TypeError:
        raise RequestError(
            "The prompt is neither a text nor a list of whole numbers: send one of them."
        ) from None
