"""The plan: waterfall, formats, recommendation, notes."""

from __future__ import annotations

from collections.abc import Sequence

from tightkv.planning.arithmetic import DeviceMemory, FormatChoice, plan_format
from tightkv.planning.capacity_plan import (
    CapacityPlan,
    FormatPlan,
    Message,
    ModelSummary,
    PlanSettings,
    Range,
    Term,
)
from tightkv.planning.hardware import Hardware
from tightkv.planning.model_facts import ModelFacts
from tightkv.planning.recommendation import recommend
from tightkv.planning.sharding import rank_kv_heads, rank_share

__all__ = ["plan_capacity"]

_GIB = 2**30
# Of what the driver reports, this much reaches the engine: an H100 of 81,559 MiB has 79.22 GiB for
# CUDA (vllm-project/vllm#10511), which is 0.995 of it.
_VISIBLE = (0.985, 0.995, 1.0)
# CUDA's context, libraries and graphs on one device: 0.35 GiB (vllm#10517) to 1.79 GiB
# (vllm#10511), and up to 0.64 GiB of graphs in public logs.
_RESERVE = (0.35, 1.0, 2.4)
# Communication buffers with more than one: vllm#10511 has 1.79 GiB more with two devices.
_COMMUNICATION = (0.2, 0.8, 1.8)
# The model's own code makes some intermediate results that a fused kernel does not, and the other
# way round. Llama-3-8B on an H100: 1.19 GiB planned, 1.26 GiB seen (vllm#10511).
_ACTIVATIONS = (0.8, 1.0, 1.5)
# Hidden states that every device holds whole, in hidden sizes: residual, input, output, gathered.
_WHOLE_STATES = 4
_TIGHTKV_ACTIVATIONS = (0.5, 1.0, 1.15)
"""Best is what TightKV itself reckons with: the largest step that it may run. A server that nobody
asks for prompt log-probabilities needs half of it."""


def plan_capacity(
    model: ModelFacts,
    choices: Sequence[FormatChoice],
    hardware: Hardware,
    settings: PlanSettings,
    activations: int,
    notes: Sequence[Message] = (),
) -> CapacityPlan:
    """Plan each of the choices on this hardware.

    Args:
        model: the model.
        choices: KV formats to compare.
        hardware: one device.
        settings: what is asked for.
        activations: bytes of a step's intermediate results on one device, unshared.
        notes: what the caller has to say of the model.
    """
    memory, terms = _waterfall(model, hardware, settings, activations)
    formats = tuple(plan_format(choice, model, hardware, settings, memory) for choice in choices)
    plan = CapacityPlan(
        model=_summary(model),
        hardware=hardware,
        settings=settings,
        waterfall=terms,
        formats=formats,
        recommendation=(),
        notes=(*notes, *_notes(model, settings, formats, choices)),
        not_modelled=_not_modelled(settings),
    )
    return recommend(plan, memory)


def _waterfall(
    model: ModelFacts, hardware: Hardware, settings: PlanSettings, activations: int
) -> tuple[DeviceMemory, tuple[Term, ...]]:
    is_tightkv = settings.engine == "tightkv"
    total = hardware.memory_bytes
    visible = Range.exactly(total) if is_tightkv else _scaled(total, _VISIBLE)
    if hardware.key.startswith("custom:"):
        visible = Range.exactly(total)
    share = settings.gpu_memory_utilization
    unused = Range(*(int(part * (1 - share)) for part in (visible.low, visible.best, visible.high)))
    weights = _weights(model, settings)
    step = _activations(model, settings, activations)
    reserve = Range.exactly(0) if is_tightkv else _reserve(settings)
    given = settings.kv_cache_memory_bytes
    if given is not None:
        pool = Range.exactly(given)
    else:
        pool = Range(
            visible.low - unused.low - weights.high - step.high - reserve.high,
            visible.best - unused.best - weights.best - step.best - reserve.best,
            visible.high - unused.high - weights.low - step.low - reserve.low,
        )
    if is_tightkv and given is None:
        best = int(total * share) - weights.best - step.best  # as its own plan rounds
        pool = Range(pool.low, best, pool.high)
    terms = (
        Term("total", visible, Message("basis_host" if is_tightkv else "basis_total")),
        Term("unused", unused, Message("basis_unused", {"share": share})),
        Term("weights", weights, _weights_basis(model)),
        Term(
            "activations",
            step,
            Message(
                "basis_activations",
                {"tokens": settings.max_num_batched_tokens, "rows": settings.max_num_seqs},
            ),
        ),
        Term("reserve", reserve, Message("basis_none" if is_tightkv else "basis_reserve")),
        Term("pool", pool, Message("basis_pool" if given is None else "basis_given")),
    )
    return DeviceMemory(visible, weights, step, reserve, pool), terms


def _weights(model: ModelFacts, settings: PlanSettings) -> Range:
    low, best, high = model.weight_bytes
    size = settings.tensor_parallel_size
    if size == 1:
        return Range(low, best, high)
    share = rank_share(model, size)
    # Engines pad the vocabulary, and differ in what they keep whole.
    return Range(low // size, int(best * share), int(high * share * 1.02))


def _weights_basis(model: ModelFacts) -> Message:
    values = {"parameters": model.num_parameters, "dtype": model.dtype}
    return Message(f"basis_weights_{model.weight_source}", values)


def _activations(model: ModelFacts, settings: PlanSettings, activations: int) -> Range:
    if settings.engine == "tightkv":
        return _scaled(activations, _TIGHTKV_ACTIVATIONS)
    low, _, high = (int(activations * factor) for factor in _ACTIVATIONS)
    whole = _WHOLE_STATES * model.hidden_bytes * settings.max_num_batched_tokens
    size = settings.tensor_parallel_size
    shared = min(activations, whole) + max(activations - whole, 0) // size
    return Range(min(low, shared) if size == 1 else int(shared * _ACTIVATIONS[0]), shared, high)


def _reserve(settings: PlanSettings) -> Range:
    more = _COMMUNICATION if settings.tensor_parallel_size > 1 else (0.0, 0.0, 0.0)
    low, best, high = (int((a + b) * _GIB) for a, b in zip(_RESERVE, more, strict=True))
    return Range(low, best, high)


def _scaled(value: int, factors: tuple[float, float, float]) -> Range:
    low, best, high = (int(value * factor) for factor in factors)
    return Range(low, best, high)


def _summary(model: ModelFacts) -> ModelSummary:
    return ModelSummary(
        name=model.name,
        model_type=model.model_type,
        num_parameters=model.num_parameters,
        num_layers=model.num_layers,
        num_shared_layers=model.num_shared_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        value_size=model.value_size,
        max_position=model.max_position,
        dtype=model.dtype,
        dtype_bytes=model.dtype_bytes,
        weight_bytes=model.weight_bytes[1],
        weight_source=model.weight_source,
    )


def _notes(
    model: ModelFacts,
    settings: PlanSettings,
    formats: Sequence[FormatPlan],
    choices: Sequence[FormatChoice],
) -> tuple[Message, ...]:
    notes = []
    size, kv_heads = settings.tensor_parallel_size, model.num_kv_heads
    if kv_heads < model.num_heads and model.latent is None:
        values = {"heads": model.num_heads, "factor": model.num_heads / kv_heads}
        notes.append(Message("note_gqa", {**values, "kv_heads": kv_heads}))
    if size > 1 and model.latent is None and size > kv_heads:
        notes.append(Message("note_copies", {"size": size, "kv_heads": kv_heads}))
    elif size > 1 and model.latent is None and kv_heads % size:
        held = rank_kv_heads(kv_heads, size)
        notes.append(Message("note_uneven", {"size": size, "kv_heads": kv_heads, "held": held}))
    if model.latent is not None:
        notes += _latent_notes(model, size, choices[0].is_latent)
    if any(kind.window for plan in formats for kind in plan.layers):
        values = {"chunk": settings.max_num_batched_tokens}
        notes.append(Message(f"note_window_{settings.engine}", values))
    notes += [
        Message("note_padding", {"name": plan.name, "padding": plan.padding})
        for plan in formats
        if plan.padding > 0
    ]
    if any(plan.is_cut(settings) for plan in formats):
        cut = {"number": settings.max_num_seqs, "length": settings.max_model_len}
        notes.append(Message("note_cut", cut))
    if model.num_shared_layers:
        notes.append(Message("note_shared", {"layers": model.num_shared_layers}))
    if settings.max_model_len > model.max_position:
        notes.append(
            Message(
                "note_too_long",
                {"length": settings.max_model_len, "max_position": model.max_position},
            )
        )
    if settings.replicas > 1:
        notes.append(Message("note_replicas", {"replicas": settings.replicas, "size": size}))
    if model.parts:
        notes.append(Message("note_parts", {"parts": ", ".join(model.parts)}))
    if model.not_served is not None:
        notes.append(Message("note_not_served", {"reason": model.not_served}))
    return tuple(notes)


def _latent_notes(model: ModelFacts, size: int, is_latent: bool) -> list[Message]:
    if model.latent is None:
        return []
    stored = model.latent.size * model.latent.num_layers
    values = {
        "size": model.latent.size,
        "stored": stored,
        "expanded": model.kv_values,
        "factor": model.kv_values / stored,
    }
    notes = [Message("note_latent" if is_latent else "note_expanded", values)]
    if is_latent and size > 1:
        notes.append(Message("note_latent_copies", {"size": size}))
    return notes


def _not_modelled(settings: PlanSettings) -> tuple[Message, ...]:
    common = ("not_prefix", "not_preemption", "not_quality")
    if settings.engine == "tightkv":
        return tuple(Message(key) for key in ("not_other_processes", *common))
    more = ("not_layout", "not_fragments", "not_speculative", "not_adapters", "not_communication")
    return tuple(Message(key) for key in (*more, *common))
