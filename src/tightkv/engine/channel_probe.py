"""Channel factors without any data: one pass over random tokens, kept for the next start.

On two models the two-factor form with these factors lost half, and a twelfth, of what int8 with
dynamic scales alone loses (KL divergence); docs/calibration.md has the figures.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from tightkv.engine.observed_model import ObservedModel
from tightkv.errors import OutputError
from tightkv.files import atomic_file, cache_folder
from tightkv.formats import LayerScales, TensorScale
from tightkv.formats.registry import dtype_name
from tightkv.formats.scales import audible
from tightkv.kernels import Backend
from tightkv.models import AttentionCall, LoadedModel, ModelGeometry

__all__ = ["PROBE_EXPONENT", "probe_factors"]

_logger = logging.getLogger("tightkv")

PROBE_EXPONENT = 0.7
_NUM_TOKENS = 256
_VERSION = 1  # raise it when the probe would find something else

AbsMax = dict[str, torch.Tensor]
"""Largest magnitude by channel `[num_kv_heads, size]`, as "k.0", "v.0", "k.1", …"""


def probe_factors(
    model: LoadedModel,
    geometry: ModelGeometry,
    backend: Backend,
    device: torch.device,
    max_model_len: int,
) -> dict[int, LayerScales]:
    """Channel factors of every layer that stores K and V, under a dynamic scale.

    Args:
        model: to be probed.
        geometry: its layers.
        backend: kernels to run it with.
        device: where it lies.
        max_model_len: positions that will be served.
    """
    path = _path(model, max_model_len)
    names = {f"{tensor}.{layer.layer_idx}" for layer in geometry.layers for tensor in "kv"}
    absmax = _load(path)
    if set(absmax) != names:
        absmax = _measure(model, geometry, backend, device, max_model_len)
        _keep(path, absmax)
    factors = {
        name: TensorScale(audible(x) ** PROBE_EXPONENT, dynamic=True) for name, x in absmax.items()
    }
    return {
        layer.layer_idx: LayerScales(
            factors[f"k.{layer.layer_idx}"], factors[f"v.{layer.layer_idx}"]
        )
        for layer in geometry.layers
    }


def _measure(
    model: LoadedModel,
    geometry: ModelGeometry,
    backend: Backend,
    device: torch.device,
    max_model_len: int,
) -> AbsMax:
    found: AbsMax = {}

    def note(call: AttentionCall, _: torch.Tensor) -> None:
        for name, x in (("k", call.key), ("v", call.value)):
            found[f"{name}.{call.layer_idx}"] = x.float().abs().amax(dim=0).cpu()

    num_tokens = min(_NUM_TOKENS, max_model_len)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(model.vocab_size, (num_tokens,), generator=generator).tolist()
    # From the first to the last: what RoPE turns slowly gets loud late.
    positions = torch.linspace(0, max_model_len - 1, num_tokens).long()
    ObservedModel(model, geometry, backend, device, num_tokens).run(token_ids, positions, note)
    return found


def _path(model: LoadedModel, max_model_len: int) -> Path:
    parts = (model.identity.weights[:32], dtype_name(model.dtype), max_model_len, _VERSION)
    return cache_folder("probes") / f"{'-'.join(map(str, parts))}.safetensors"


def _load(path: Path) -> AbsMax:
    try:
        return load_file(path) if path.is_file() else {}
    except (OSError, SafetensorError):
        return {}  # measured anew


def _keep(path: Path, absmax: AbsMax) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(save({name: x.contiguous() for name, x in absmax.items()}))
    except (OSError, OutputError) as error:
        _logger.warning("The probe's result cannot be kept (%s): set TIGHTKV_CACHE_DIR.", error)
