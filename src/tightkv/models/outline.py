"""A model without its weights: shapes, sizes and intermediate results, from the config alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tightkv.errors import TightKVError, UnsupportedModelError
from tightkv.models.activation import activation_bytes_per_token
from tightkv.models.attention import use_paged_attention
from tightkv.models.compatibility import one_line, quiet_transformers
from tightkv.models.decoder_layer import fused_step_bytes
from tightkv.models.geometry import ModelGeometry, probe_geometry

__all__ = ["ModelOutline", "outline_model"]

_LANES = 16  # rows of a packed weight come in panels of this many (kernels/cpu.py)


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """What is known of a model before its weights are there.

    Attributes:
        geometry: shapes of the attention layers.
        parameters: name and shape of each weight; shared ones once.
        held_bytes: what TightKV holds of them: linear layers packed, all else as it is.
        activation_bytes: bytes of a step's largest intermediate results, per token.
        step_bytes: what TightKV's steps need of the same, per token.
    """

    geometry: ModelGeometry
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    held_bytes: int
    activation_bytes: float
    step_bytes: float


def outline_model(
    config: PreTrainedConfig, dtype: torch.dtype, packed_dtype: torch.dtype
) -> ModelOutline:
    """Build the model on the meta device and run a few tokens through it.

    Args:
        config: the model's.
        dtype: of its weights and intermediate results when it is served.
        packed_dtype: of packed weights, which are kept as narrow as the checkpoint has them.

    Raises:
        UnsupportedModelError: if the model's code needs weights, or uses attention in a way that
            no cache of K and V can serve.
    """
    try:
        return _outline(config, dtype, dtype, packed_dtype)
    except UnsupportedModelError:
        # Products of experts can be traced in bfloat16 alone.
        return _outline(config, torch.bfloat16, dtype, packed_dtype)


def _outline(
    config: PreTrainedConfig, built: torch.dtype, dtype: torch.dtype, packed_dtype: torch.dtype
) -> ModelOutline:
    untyped: Any = AutoModelForCausalLM
    settings = copy.deepcopy(config)
    settings.pad_token_id = None  # some models look for it among the tokens, which have no values
    try:
        with quiet_transformers(), torch.device("meta"):
            model: PreTrainedModel = untyped.from_config(
                settings, dtype=built, attn_implementation="eager"
            )
            model.train(False)
            use_paged_attention(model)
            geometry = probe_geometry(model)
            activations = activation_bytes_per_token(model) * dtype.itemsize / built.itemsize
    except TightKVError:
        raise
    except Exception as error:  # whatever the code of a hundred architectures stumbles over
        raise UnsupportedModelError(
            f"What models of type {config.model_type!r} cache cannot be learned without their "
            f"weights ({one_line(error)}): plan another model."
        ) from error
    fused = fused_step_bytes(model, dtype)
    return ModelOutline(
        geometry=geometry,
        parameters=tuple((name, tuple(x.shape)) for name, x in model.named_parameters()),
        held_bytes=_held_bytes(model, dtype, packed_dtype),
        activation_bytes=activations,
        step_bytes=activations + _gate_bytes(model, dtype) if fused is None else fused,
    )


def _held_bytes(model: PreTrainedModel, dtype: torch.dtype, packed_dtype: torch.dtype) -> int:
    """As `weight_bytes` counts after packing: a tied embedding is held plain and packed."""
    packed = [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]
    packed_weights = {id(module.weight) for module in packed}
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    gone = packed_weights - embeddings
    plain = {id(x): x.numel() * dtype.itemsize for x in model.parameters() if id(x) not in gone}
    plain |= {id(x): x.nbytes for x in model.buffers()}
    return sum(plain.values()) + sum(_panel_bytes(module, packed_dtype) for module in packed)


def _panel_bytes(module: nn.Linear | Conv1D, dtype: torch.dtype) -> int:
    rows, columns = module.weight.shape
    if isinstance(module, Conv1D):
        rows, columns = columns, rows
    return -(-rows // _LANES) * _LANES * columns * dtype.itemsize


def _gate_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Per token, the gate before its activation: a joined product keeps it, transformers do not."""
    gates = (getattr(layer, "gate_proj", None) for layer in model.modules())
    sizes = (gate.out_features for gate in gates if isinstance(gate, nn.Linear))
    return max(sizes, default=0) * dtype.itemsize
