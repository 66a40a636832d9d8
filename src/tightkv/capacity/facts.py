"""What planning must know of a model, from its config and the sizes of its files."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig

from tightkv.capacity.source import ModelSource
from tightkv.errors import ConfigError, TightKVError
from tightkv.formats.registry import dtype_name
from tightkv.models import ModelGeometry
from tightkv.models.compatibility import check_architecture, check_model
from tightkv.models.outline import ModelOutline, outline_model
from tightkv.planning import LatentCache, ModelFacts, Parameter

__all__ = ["model_facts", "served_dtype"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NARROW = (torch.float16, torch.bfloat16)
# Bits per weight of linear layers by quant_method; embeddings and norms stay at 16.
_QUANTIZED_BITS = {"fp8": 8.0, "mxfp4": 4.25, "fbgemm_fp8": 8.0, "modelopt": 8.0}
_DOUBT = 0.1
_ROPE_BY_POSITION = ("dynamic", "longrope")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def served_dtype(source: ModelSource, asked: str, is_tightkv: bool) -> torch.dtype:
    """Type of weights and intermediate results, as the engine takes it.

    Raises:
        ConfigError: for a type that does not exist.
    """
    if asked != "auto":
        if asked not in _DTYPES:
            raise ConfigError(f"Unknown dtype {asked!r}: allowed are auto, {', '.join(_DTYPES)}.")
        return _DTYPES[asked]
    if is_tightkv:
        return torch.float32
    stored = _stored_dtype(source)
    return stored if stored in _NARROW else torch.float16 if stored else torch.bfloat16


def model_facts(
    source: ModelSource, dtype: torch.dtype, is_tightkv: bool, weight_bytes: int | None
) -> tuple[ModelFacts, ModelGeometry]:
    """Facts and shapes of a model.

    Args:
        source: the model.
        dtype: it is served in.
        is_tightkv: whether TightKV serves it.
        weight_bytes: of its weights, where the user knows better.

    Raises:
        UnsupportedModelError: if what it caches is not known.
    """
    not_served = _refusal(source)
    if is_tightkv and not_served is not None:
        raise not_served
    text = copy.deepcopy(source.text)
    if text is not source.config and source.config.is_encoder_decoder:
        check_architecture(source.config)
    # How the weights are stored does not change what is cached.
    if getattr(text, "quantization_config", None) is not None:
        del text.quantization_config
    _use_plain_rope(text)
    check_architecture(text)
    stored = _stored_dtype(source)
    packed = stored if stored in _NARROW and dtype == torch.float32 else dtype
    outline = outline_model(text, dtype, packed if not source.is_gguf else dtype)
    weights, where = _weights(source, outline, dtype, is_tightkv, weight_bytes)
    layers = outline.geometry.layers
    experts = _first(text, _EXPERTS, 1)
    return ModelFacts(
        name=source.name,
        model_type=text.model_type,
        num_layers=len(layers) + len(outline.geometry.kv_sources),
        num_shared_layers=len(outline.geometry.kv_sources),
        num_heads=max(layer.num_heads for layer in layers),
        num_kv_heads=max(layer.num_kv_heads for layer in layers),
        head_size=_only({layer.head_size for layer in layers}),
        value_size=_only({layer.value_size for layer in layers}),
        kv_values=sum(x.num_kv_heads * (x.head_size + x.value_size) for x in layers),
        max_position=_first(text, ("max_position_embeddings",), 0) or _unknown_length(text),
        vocab_size=text.vocab_size,
        dtype=dtype_name(dtype),
        dtype_bytes=dtype.itemsize,
        parameters=tuple(Parameter(name, shape) for name, shape in outline.parameters),
        weight_bytes=weights,
        weight_source=where,
        activation_bytes=_activation_bytes(text, outline, dtype, is_tightkv),
        hidden_bytes=_first(text, ("hidden_size",), 0) * dtype.itemsize,
        num_experts=experts,
        experts_per_token=_first(text, ("num_experts_per_tok",), 1) if experts > 1 else 1,
        latent=_latent(text, len(layers)),
        not_served=None if not_served is None else str(not_served),
        parts=_other_parts(source),
    ), outline.geometry


def _use_plain_rope(text: PreTrainedConfig) -> None:
    """Rotary scaling that looks at positions, which have no values here; it moves no bytes."""
    rope = getattr(text, "rope_parameters", None)  # not every config has the field
    for settings in [rope, *rope.values()] if isinstance(rope, dict) else ():
        if isinstance(settings, dict) and settings.get("rope_type") in _ROPE_BY_POSITION:
            settings["rope_type"] = "default"


def _activation_bytes(
    text: PreTrainedConfig, outline: ModelOutline, dtype: torch.dtype, is_tightkv: bool
) -> float:
    """Of one token: as measured on the model's own code, but with experts in fused kernels.

    transformers may copy the weights of a token's experts; a fused kernel keeps of each expert the
    gate, the product and the output alone, besides a few hidden states.
    """
    if is_tightkv:
        return outline.step_bytes
    if _first(text, _EXPERTS, 1) == 1:
        return outline.activation_bytes
    chosen, hidden = _first(text, ("num_experts_per_tok",), 1), _first(text, ("hidden_size",), 0)
    wide = _first(text, ("intermediate_size",), 0)
    of_expert = 3 * _first(text, ("moe_intermediate_size",), wide) + hidden
    values = 6 * hidden + max(3 * wide, chosen * of_expert)
    return min(outline.activation_bytes, float(values * dtype.itemsize))


def _weights(
    source: ModelSource,
    outline: ModelOutline,
    dtype: torch.dtype,
    is_tightkv: bool,
    given: int | None,
) -> tuple[tuple[int, int, int], str]:
    """Bytes of all weights, and where they are from."""
    counted = sum(torch.Size(shape).numel() for _, shape in outline.parameters) * dtype.itemsize
    if given is not None:
        return (given, given, given), "given"
    if is_tightkv:
        return (outline.held_bytes,) * 3, "config"
    quantization: Any = getattr(source.config, "quantization_config", None)
    if quantization is None:
        quantization = getattr(source.text, "quantization_config", None)
    quantized = quantization is not None or source.is_gguf
    if source.file_bytes is not None and (quantized or _stored_dtype(source) in (dtype, None)):
        return (source.file_bytes,) * 3, "files"
    if not quantized:
        return (counted, counted, counted), "config"
    best = int(_quantized_bytes(outline, quantization))
    return (int(best * (1 - _DOUBT)), best, int(best * (1 + _DOUBT))), "quantization"


def _quantized_bytes(outline: ModelOutline, quantization: Any) -> float:
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(settings.get("quant_method"))
    bits = _bits(settings, method)
    total = 0.0
    for name, shape in outline.parameters:
        is_plain = len(shape) < 2 or "embed" in name or "lm_head" in name
        # MXFP4 is for experts alone.
        is_plain |= method == "mxfp4" and ".experts." not in name
        total += torch.Size(shape).numel() * (16.0 if is_plain else bits) / 8
    return total


def _bits(settings: dict[str, Any], method: str) -> float:
    if method in _QUANTIZED_BITS:
        return _QUANTIZED_BITS[method]
    bits = settings.get("bits") or settings.get("w_bit")
    if bits is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        bits = 4.5 if settings.get("load_in_4bit") else 8
    if bits is None:
        groups = settings.get("config_groups") or {}
        bits = next(
            (group["weights"]["num_bits"] for group in groups.values() if group.get("weights")),
            None,
        )
    if not isinstance(bits, int | float):
        raise ConfigError(
            f"How many bits the weights have, quantized with {method!r}, is not known without "
            "their files: give --weight-bytes."
        )
    # A 16-bit scale and zero point for each group of 128.
    return bits + 0.25 if bits < 8 else float(bits)


def _latent(text: PreTrainedConfig, num_layers: int) -> LatentCache | None:
    rank, rope = _first(text, ("kv_lora_rank",), 0), _first(text, ("qk_rope_head_dim",), 0)
    return LatentCache(rank + rope, num_layers) if rank and rope else None


def _stored_dtype(source: ModelSource) -> torch.dtype | None:
    for config in (source.config, source.text):
        dtype = getattr(config, "dtype", None)  # a multimodal config has it in one of the two
        if isinstance(dtype, torch.dtype):
            return dtype
        if isinstance(dtype, str) and dtype in _DTYPES:
            return _DTYPES[dtype]
    return None


def _only(sizes: set[int]) -> int:
    """The one size, or 0 where there are several."""
    return sizes.pop() if len(sizes) == 1 else 0


def _first(config: PreTrainedConfig, names: tuple[str, ...], default: int) -> int:
    """The first of some fields that a config has; types of models differ in them."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), default)


def _unknown_length(text: PreTrainedConfig) -> int:
    raise ConfigError(
        f"The config of type {text.model_type!r} does not tell max_position_embeddings: add it."
    )


def _refusal(source: ModelSource) -> TightKVError | None:
    try:
        check_model(copy.deepcopy(source.config))
    except TightKVError as error:
        return error
    return None


def _other_parts(source: ModelSource) -> tuple[str, ...]:
    if source.text is source.config:
        return ()
    parts = (
        name
        for name in source.config.sub_configs
        if getattr(source.config, name, None) not in (None, source.text)
    )
    return tuple(sorted(parts))
