"""`plan(model, hardware=…)`: from a name to a capacity plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from tightkv.capacity.choices import format_choices
from tightkv.capacity.facts import model_facts, served_dtype
from tightkv.capacity.source import read_source
from tightkv.config import CacheConfig
from tightkv.engine.scheduler import MAX_PROMPT_LOGPROBS_ROWS
from tightkv.errors import ConfigError
from tightkv.models import logits_bytes
from tightkv.planning import (
    CapacityPlan,
    FormatChoice,
    Hardware,
    Message,
    ModelFacts,
    PlanSettings,
    check_heads,
    check_max_model_len,
    find_hardware,
    plan_capacity,
)

__all__ = ["DEFAULT_KV_CACHE_DTYPES", "plan"]

DEFAULT_KV_CACHE_DTYPES = ("auto", "fp8", "int8")

_FLOAT32_BYTES = 4


def plan(
    model: str,
    *,
    hardware: str = "host",
    tensor_parallel_size: int | None = None,
    num_gpus: int | None = None,
    max_model_len: int | None = None,
    typical_len: int | None = None,
    kv_cache_dtypes: str | Sequence[str] = DEFAULT_KV_CACHE_DTYPES,
    kv_cache_dtype_skip_layers: Sequence[str] = (),
    static: bool = False,
    gpu_memory_utilization: float = 0.9,
    kv_cache_memory_bytes: int | None = None,
    block_size: int = 16,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    concurrency: int | None = None,
    dtype: str = "auto",
    weight_bytes: int | None = None,
    revision: str | None = None,
) -> CapacityPlan:
    """Plan which KV cache precision fits how many requests; needs no weights and no GPU.

    Args:
        model: folder with a `config.json`, that file, a GGUF file, or a hub id.
        hardware: a name of the catalog, "cpu", "host", or `custom:96GiB[,bandwidth=3.35TB/s]`.
            On "cpu" and "host" it is planned as TightKV serves, else as vLLM does.
        tensor_parallel_size: devices that share the model; default: `num_gpus`, or 1.
        num_gpus: devices in all; a multiple of `tensor_parallel_size`.
        max_model_len: longest request in tokens; default: what the model knows.
        typical_len: an ordinary request; default: 1,200 tokens, or `max_model_len` if less.
        kv_cache_dtypes: formats to compare: "int8", K and V apart as "int8/fp8", or with a scales
            file as "auto@scales.json".
        kv_cache_dtype_skip_layers: layers left in the model's data type.
        static: static scales alone, without a dynamic one per token and head.
        gpu_memory_utilization: share of the memory that may be used.
        kv_cache_memory_bytes: the pool's size, where it is given.
        block_size: tokens per block, a multiple of 16.
        max_num_seqs: most requests in a step; default: the engine's.
        max_num_batched_tokens: most tokens in a step; default: the engine's.
        concurrency: requests of `max_model_len` tokens that must fit at once.
        dtype: of weights and intermediate results; "auto" as the engine decides.
        weight_bytes: bytes of all weights, where the config does not tell.
        revision: branch, tag or commit of a hub id.

    Returns:
        The plan; `fits` says whether any of the formats does.

    Raises:
        ConfigError: for settings that are wrong; as UnsupportedModelError, a model whose cache is
            not known.
        CheckpointError: if the config cannot be read.
        ScaleError: for a scales file that does not fit.
    """
    device = find_hardware(hardware)
    size, replicas = _devices(device, tensor_parallel_size, num_gpus)
    cache = CacheConfig(
        kv_cache_dtype_skip_layers=tuple(kv_cache_dtype_skip_layers),
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
    )
    wanted = _Load(max_model_len, typical_len, max_num_seqs, max_num_batched_tokens, concurrency)
    _check_positive(weight_bytes=weight_bytes, **asdict(wanted))
    source = read_source(model, revision)
    served = served_dtype(source, dtype, device.is_host)
    facts, geometry = model_facts(source, served, device.is_host, weight_bytes)
    check_heads((layer.num_heads for layer in geometry.layers), size)
    latent = None if device.is_host else facts.latent
    choices = format_choices(kv_cache_dtypes, source, geometry, served, latent, cache, static)
    return _planned(facts, choices, device, _settings(facts, device, size, replicas, cache, wanted))


@dataclass(frozen=True, slots=True)
class _Load:
    """Requests as they were asked for; None where nobody said."""

    max_model_len: int | None
    typical_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    concurrency: int | None


def _settings(
    facts: ModelFacts, device: Hardware, size: int, replicas: int, cache: CacheConfig, load: _Load
) -> PlanSettings:
    if device.is_host:
        check_max_model_len(load.max_model_len, facts.max_position)
    longest = load.max_model_len or facts.max_position
    return PlanSettings(
        engine="tightkv" if device.is_host else "vllm",
        tensor_parallel_size=size,
        replicas=replicas,
        max_model_len=longest,
        is_length_given=load.max_model_len is not None,
        typical_len=_typical(load.typical_len, longest),
        gpu_memory_utilization=cache.gpu_memory_utilization,
        kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
        block_size=cache.block_size,
        max_num_seqs=load.max_num_seqs or device.max_num_seqs,
        max_num_batched_tokens=load.max_num_batched_tokens or device.max_num_batched_tokens,
        concurrency=load.concurrency,
    )


def _planned(
    facts: ModelFacts, choices: Sequence[FormatChoice], device: Hardware, settings: PlanSettings
) -> CapacityPlan:
    is_dynamic = any(spec.k_format.dynamic for choice in choices for spec in choice.specs)
    notes = [Message("note_static")] if is_dynamic else []
    return plan_capacity(facts, choices, device, settings, _activations(facts, settings), notes)


def _devices(
    device: Hardware, tensor_parallel_size: int | None, num_gpus: int | None
) -> tuple[int, int]:
    """Devices that share the model, and how many such groups there are."""
    _check_positive(tensor_parallel_size=tensor_parallel_size, num_gpus=num_gpus)
    size = tensor_parallel_size or num_gpus or 1
    total = num_gpus or size
    if total % size:
        raise ConfigError(
            f"num_gpus is {total}, which is no multiple of tensor_parallel_size {size}: give "
            "one of the two, or a multiple."
        )
    if device.is_host and total > 1:
        raise ConfigError(
            f"On {device.key!r} TightKV is planned, which serves on one device, but {total} were "
            "asked for: leave it at 1, or name the accelerator."
        )
    return size, total // size


def _typical(given: int | None, longest: int) -> int:
    if given is not None and given > longest:
        raise ConfigError(
            f"A request of {given:,} tokens is longer than the {longest:,} of max_model_len: "
            "shorten it, or raise max_model_len."
        )
    return given or min(_TYPICAL_LEN, longest)


_TYPICAL_LEN = 1200
"""Prompt and answer of an ordinary chat request, where nobody says more."""


def _activations(model: ModelFacts, settings: PlanSettings) -> int:
    """Bytes of the largest step's intermediate results and logits on one device, unshared."""
    step = model.activation_bytes * settings.max_num_batched_tokens
    rows = settings.max_num_seqs
    if settings.engine == "tightkv":
        logits = logits_bytes(
            model.vocab_size, getattr(torch, model.dtype), rows, MAX_PROMPT_LOGPROBS_ROWS
        )
    else:
        # Once as they are, once in float32, once as probabilities.
        logits = rows * model.vocab_size * (2 + 2 * _FLOAT32_BYTES)
    return int(step) + logits


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} is {value!r}: it must be a whole number, at least 1.")
