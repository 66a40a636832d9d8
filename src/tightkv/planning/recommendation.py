"""Three sentences: which precision, how much memory, how many requests; each with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tightkv.planning.arithmetic import DeviceMemory
from tightkv.planning.capacity_plan import CapacityPlan, FormatPlan, Message

__all__ = ["recommend"]

_POOL_USE = 0.6
"""Of the pool at the typical load: what requests that run longer than usual need is the rest."""
_SMALL_SHARE = 0.1
"""Below it, halving K and V shortens a decode step by less than a twentieth."""
_WIDE_BITS = 12
_LONG = 32 * 1024
_WIDE_LAYERS = 0.1
_UTILIZATIONS = (0.92, 0.9, 0.88, 0.85)


def recommend(plan: CapacityPlan, memory: DeviceMemory) -> CapacityPlan:
    """The same plan with its recommendation, and a note where the estimate is too rough."""
    wide = max(plan.formats, key=lambda formats: formats.bytes_per_token)
    narrow = min(
        plan.formats,
        key=lambda fmt: (fmt.bytes_per_token, fmt.has_integers == plan.hardware.native_fp8),
    )
    messages = [_precision(plan, memory, wide, narrow)]
    helps = "no_help" not in messages[0].key
    if memory.pool.best > 0:
        messages += [_utilization(plan, memory), _max_num_seqs(plan, narrow if helps else wide)]
        if helps and plan.settings.max_model_len >= _LONG and narrow is not wide:
            messages.append(_mix(plan, memory, wide, narrow))
    notes = plan.notes
    if plan.fits and memory.pool.low < narrow.request_bytes:
        notes = (*notes, Message("note_risk", {"low_bytes": memory.pool.low}))
    return replace(plan, recommendation=tuple(messages), notes=notes)


def _precision(
    plan: CapacityPlan, memory: DeviceMemory, wide: FormatPlan, narrow: FormatPlan
) -> Message:
    settings = plan.settings
    if memory.pool.best <= 0:
        usable = memory.total.best * settings.gpu_memory_utilization
        room = {"weights_bytes": memory.weights.best, "usable_bytes": int(usable)}
        return Message("rec_weights", room)
    if not plan.fits:
        return _does_not_fit(plan, narrow)
    no_help = _no_help(plan, wide)
    if no_help is not None:
        return no_help
    values: dict[str, Any] = {
        "name": narrow.name,
        "wide": wide.name,
        "factor": narrow.requests_at_typical_len / wide.requests_at_typical_len,
        "wide_requests": wide.requests_at_typical_len,
        "requests": narrow.requests_at_typical_len,
        "typical_len": settings.typical_len,
    }
    if narrow is wide:
        return Message("rec_one", values)
    if plan.hardware.native_fp8:
        return Message("rec_fp8", values)
    return Message("rec_int8_host" if settings.engine == "tightkv" else "rec_int8", values)


def _no_help(plan: CapacityPlan, wide: FormatPlan) -> Message | None:
    """Why a narrower cache would change nothing, if so."""
    settings, decode = plan.settings, wide.decode
    wanted = settings.concurrency or settings.max_num_seqs
    use = wanted / _room(plan, wide, wide.requests_at_typical_len)
    if not wide.fits or use > _POOL_USE:
        return None
    values = {
        "wide": wide.name,
        "wanted": wanted,
        "typical_len": settings.typical_len,
        "use": use,
    }
    if decode is None or wide.effective_bits < _WIDE_BITS:
        return Message("rec_no_help_room", values)
    values["kv_share"] = decode.kv_share
    if decode.bound == "compute":
        return Message("rec_no_help_compute", values)
    if decode.kv_share < _SMALL_SHARE:
        return Message("rec_no_help_weights", values)
    return Message("rec_speed_only", {**values, "saved": decode.kv_share / 2})


def _does_not_fit(plan: CapacityPlan, narrow: FormatPlan) -> Message:
    settings = plan.settings
    if settings.concurrency is not None and narrow.requests_at_max_len >= 1:
        return Message(
            "rec_too_many",
            {
                "name": narrow.name,
                "requests": int(narrow.requests_at_max_len),
                "length": settings.max_model_len,
                "concurrency": settings.concurrency,
                "device_bytes": narrow.needed[0].device_bytes,
            },
        )
    return Message(
        "rec_shorter",
        {
            "name": narrow.name,
            "length": settings.max_model_len,
            "longest": narrow.longest_context,
            "request_bytes": narrow.request_bytes,
            "pool_bytes": plan.pool.best,
        },
    )


def _utilization(plan: CapacityPlan, memory: DeviceMemory) -> Message:
    """The largest share whose rest covers what the estimate may be short of."""
    doubt = memory.reserve.high - memory.reserve.best
    doubt += memory.activations.high - memory.activations.best
    total = memory.total.best
    share = next((s for s in _UTILIZATIONS if total * (1 - s) >= doubt), _UTILIZATIONS[-1])
    rest = int(total * (1 - share))
    values = {"share": share, "rest_bytes": rest, "doubt_bytes": doubt}
    return Message(f"rec_utilization_{plan.settings.engine}", values)


def _max_num_seqs(plan: CapacityPlan, chosen: FormatPlan) -> Message:
    fitting = _room(plan, chosen, chosen.requests_at_typical_len)
    number = max(int(_POOL_USE * fitting), 1)
    use = number / fitting if fitting else 1.0
    values = {
        "name": chosen.name,
        "number": number,
        "typical_len": plan.settings.typical_len,
        "use": use,
    }
    if use > _POOL_USE:
        return Message("rec_one_request", values)
    rest = {
        "typical_more": int((1 - use) * fitting),
        "long_more": (1 - use) * _room(plan, chosen, chosen.requests_at_max_len),
        "length": plan.settings.max_model_len,
    }
    return Message("rec_max_num_seqs", {**values, **rest})


def _room(plan: CapacityPlan, of: FormatPlan, requests: float) -> float:
    """Requests that the whole room for the pool takes, of those that fit into the blocks.

    TightKV makes no more blocks than `max_num_seqs` requests can need: with more of these there
    would be more blocks, too.
    """
    is_cut = of.is_cut(plan.settings)
    return requests * plan.pool.best / of.pool_bytes if is_cut else requests


def _mix(plan: CapacityPlan, memory: DeviceMemory, wide: FormatPlan, narrow: FormatPlan) -> Message:
    layers = sum(kind.num_layers for kind in narrow.layers)
    kept = -(-layers * _WIDE_LAYERS // 1)
    per_token = narrow.bytes_per_token
    per_token += kept / layers * (wide.bytes_per_token - narrow.bytes_per_token)
    return Message(
        "rec_mix",
        {
            "kept": int(kept),
            "layers": layers,
            "wide": wide.name,
            "name": narrow.name,
            "per_token": per_token,
            "tokens": int(memory.pool.best / per_token),
            "narrow_tokens": narrow.num_tokens.best,
        },
    )
