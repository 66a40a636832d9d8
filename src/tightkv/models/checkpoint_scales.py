"""KV cache scales that other tools left in a checkpoint, as compressed-tensors or ModelOpt do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tightkv.errors import CheckpointError, ScaleError
from tightkv.formats import LayerScales, TensorScale

__all__ = ["CheckpointScales", "is_scale_name", "only_the_cache_is_quantized", "read_scales"]

# `…layers.7.self_attn.k_scale` (compressed-tensors, vLLM), `….k_proj.k_scale` (ModelOpt),
# `….qkv_proj.k_scale`; `kv_scale` is one for both.
_SCALE = re.compile(
    r".*\.(?:layers|h)\.(?P<layer>\d+)\.(?:self_attn|attn|attention|self_attention)\."
    r"(?:(?P<proj>[kv]|qkv)_proj\.)?(?P<tensor>k|v|kv)_scale"
)
_LOOKS_LIKE_ONE = re.compile(r"(?:^|[._])(?:k|v|kv|key|value)_(?:cache_)?scale$")
# Kept beside them by some tools: a scale of the query is not used here, zero points are 0.
_HARMLESS = re.compile(
    r".*\.(?:self_attn|attn|attention)\.(?:q_scale|prob_output_scale|[kv]_zero_point)"
)


# compressed-tensors' words, and ModelOpt's.
_FORMATS = {"float": "fp8_e4m3", "int": "int8", "FP8": "fp8_e4m3", "INT8": "int8"}


@dataclass(frozen=True, slots=True)
class CheckpointScales:
    """Static scales by layer, and the format that they are for."""

    kv_cache_dtype: str
    layers: Mapping[int, LayerScales]


def is_scale_name(name: str) -> bool:
    """Whether a tensor of a checkpoint is a scale of the KV cache, or kept beside one."""
    return bool(_SCALE.fullmatch(name) or _HARMLESS.fullmatch(name))


def read_scales(folder: Path, quantization: object) -> CheckpointScales | None:
    """The scales in a checkpoint's folder, or None.

    Args:
        folder: with safetensors files.
        quantization: `quantization_config` of its `config.json`, or None.

    Raises:
        CheckpointError: for a scale under a name that is not known, which would be lost.
        ScaleError: for a scheme that is not served, or a scale that is not usable.
    """
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in _scale_tensors(folder):
        match = _SCALE.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{folder} has a KV cache scale under an unknown name, {name}: rename it to "
                "…layers.N.self_attn.k_scale, or remove it."
            )
        for tensor in match["tensor"]:
            found.setdefault(int(match["layer"]), {})[tensor] = value
    if not found:
        return None
    return CheckpointScales(
        _format(folder, quantization),
        {layer: LayerScales(*(_scale(layer, t, of) for t in "kv")) for layer, of in found.items()},
    )


def only_the_cache_is_quantized(settings: object) -> bool:
    """Whether a `quantization_config` speaks of the KV cache alone: the weights are plain."""
    if not isinstance(settings, Mapping) or not settings.get("kv_cache_scheme"):
        return False
    return not settings.get("config_groups") and settings.get("quant_algo") in (None, "")


def _scale_tensors(folder: Path) -> Iterable[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                if _SCALE.fullmatch(name) or _LOOKS_LIKE_ONE.search(name):
                    yield name, file.get_tensor(name).float()


def _scale(layer: int, tensor: str, found: Mapping[str, torch.Tensor]) -> TensorScale | None:
    if tensor not in found:
        return None
    values = found[tensor].squeeze()  # [1] and [heads, 1, 1] occur
    try:
        return TensorScale(values)
    except ScaleError as error:
        raise ScaleError(f"{tensor}_scale of layer {layer} in the checkpoint: {error}") from error


def _format(folder: Path, quantization: object) -> str:
    """E4M3 unless the scheme says int8."""
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    modelopt = folder / "hf_quant_config.json"
    if not scheme and modelopt.is_file():
        algorithm = _kv_cache_algorithm(modelopt) or "FP8"
        if algorithm not in _FORMATS:
            raise ScaleError(
                f"{modelopt} has kv_cache_quant_algo {algorithm!r}: FP8 and INT8 are served."
            )
        return _FORMATS[algorithm]
    scheme = scheme or {}
    num_bits, kind = scheme.get("num_bits", 8), scheme.get("type", "float")
    symmetric, strategy = scheme.get("symmetric", True), scheme.get("strategy", "tensor")
    is_served = num_bits == 8 and symmetric and strategy in ("tensor", "attn_head")
    if not is_served or kind not in _FORMATS:
        raise ScaleError(
            f"The kv_cache_scheme of {folder} has {num_bits} bits of type {kind!r}, strategy "
            f"{strategy!r}, symmetric {symmetric}: served are 8 bits, float or int, symmetric, per "
            "tensor or attn_head."
        )
    return _FORMATS[kind]


def _kv_cache_algorithm(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["quantization"]["kv_cache_quant_algo"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
