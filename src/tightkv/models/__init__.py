"""Models of transformers, loaded, packed, and their attention handed to the cache."""

from tightkv.models.activation import logits_bytes, peak_activation_bytes
from tightkv.models.attention import AttentionCall, StepHandler, attend_with, use_paged_attention
from tightkv.models.chat_template import check_template_arguments, render_chat
from tightkv.models.checkpoint import ModelIdentity
from tightkv.models.checkpoint_scales import CheckpointScales
from tightkv.models.compatibility import one_line
from tightkv.models.decoder_layer import fuse_decoder_layers, runs_in_one_call
from tightkv.models.geometry import (
    LayerGeometry,
    ModelGeometry,
    geometry_without_weights,
    probe_geometry,
)
from tightkv.models.loader import Checkpoint, LoadedModel, load_model
from tightkv.models.prepare import prepare_model

__all__ = [
    "AttentionCall",
    "Checkpoint",
    "CheckpointScales",
    "LayerGeometry",
    "LoadedModel",
    "ModelGeometry",
    "ModelIdentity",
    "StepHandler",
    "attend_with",
    "check_template_arguments",
    "fuse_decoder_layers",
    "geometry_without_weights",
    "load_model",
    "logits_bytes",
    "one_line",
    "peak_activation_bytes",
    "prepare_model",
    "probe_geometry",
    "render_chat",
    "runs_in_one_call",
    "use_paged_attention",
]
