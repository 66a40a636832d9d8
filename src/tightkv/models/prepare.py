"""A loaded model made ready to be served."""

from __future__ import annotations

from transformers import PreTrainedModel

from tightkv.models.attention import use_paged_attention
from tightkv.models.decoder_layer import fuse_decoder_layers
from tightkv.models.geometry import ModelGeometry, probe_geometry

__all__ = ["prepare_model"]


def prepare_model(model: PreTrainedModel) -> ModelGeometry:
    """Hand its attention to `attend_with`, fuse its layers, and learn their shapes.

    From then on the model runs inside `attend_with` only; a second call changes nothing.

    Raises:
        UnsupportedModelError: if it uses attention in a way that the cache cannot serve.
    """
    use_paged_attention(model)
    fuse_decoder_layers(model)
    return probe_geometry(model)
