"""Models of transformers, loaded, packed, and their attention handed to the cache."""

from tightkv.models.activation import peak_activation_bytes
from tightkv.models.attention import AttentionCall, attend_with, use_paged_attention
from tightkv.models.compatibility import one_line
from tightkv.models.decoder_layer import fuse_decoder_layers
from tightkv.models.geometry import LayerGeometry, ModelGeometry, probe_geometry
from tightkv.models.loader import LoadedModel, load_model

__all__ = [
    "AttentionCall",
    "LayerGeometry",
    "LoadedModel",
    "ModelGeometry",
    "attend_with",
    "fuse_decoder_layers",
    "load_model",
    "one_line",
    "peak_activation_bytes",
    "probe_geometry",
    "use_paged_attention",
]
