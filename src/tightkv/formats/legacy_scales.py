"""The JSON of scales that vLLM read until 0.6 (`--quantization-param-path`) and SGLang reads.

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn",
     "scaling_factor": {"0": {"0": 0.0152, "1": 0.0189, ...}}}}

One scale for K and V together, by tensor-parallel rank and layer. A rank held an equal share of the
KV heads, so several ranks are scales per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tightkv.errors import ScaleError
from tightkv.formats.scales import KVCachePolicy, LayerPolicy, TensorPolicy, TensorScale

__all__ = ["LegacyScales", "is_legacy_document"]

_FORMAT = "fp8_e4m3"


class _Cache(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    dtype: Literal["float8_e4m3fn"]
    scaling_factor: dict[str, dict[str, float]] = Field(min_length=1)


class LegacyScales(BaseModel):
    """What the file says."""

    model_config = ConfigDict(extra="ignore", strict=True)
    model_type: str | None = None
    kv_cache: _Cache

    @classmethod
    def parse(cls, path: Path, document: object) -> LegacyScales:
        """Check the content of a JSON file.

        Raises:
            ScaleError: names the file, and the place in it.
        """
        try:
            scales = cls.model_validate(document)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise ScaleError(f"{path}: {where}: {problem['msg']}: correct it.") from None
        ranks = scales.kv_cache.scaling_factor
        layers = {frozenset(of_rank) for of_rank in ranks.values()}
        expected = {str(rank) for rank in range(len(ranks))}
        numbered = all(name.isdecimal() and name.isascii() for of in layers for name in of)
        if set(ranks) != expected or len(layers) != 1 or not numbered:
            raise ScaleError(
                f"{path}: kv_cache.scaling_factor must have ranks from 0 on, and the same layers, "
                "by index, in each: calibrate anew."
            )
        return scales

    def policy(self, path: str, source: str, num_kv_heads: Mapping[int, int]) -> KVCachePolicy:
        """How each layer is stored.

        Args:
            path: for messages.
            source: for the log.
            num_kv_heads: of each layer of the model.

        Raises:
            ScaleError: for a scale that is not usable, or ranks that do not divide the KV heads.
        """
        ranks = self.kv_cache.scaling_factor
        policy = {}
        for name in ranks["0"]:
            values = torch.tensor([ranks[str(rank)][name] for rank in range(len(ranks))])
            heads = num_kv_heads.get(int(name), len(ranks))
            if heads % len(ranks):
                raise ScaleError(
                    f"{path}: kv_cache.scaling_factor has {len(ranks)} ranks, which cannot share "
                    f"the {heads} KV heads of layer {name}: it was made for another model."
                )
            values = values[0] if len(ranks) == 1 else values.repeat_interleave(heads // len(ranks))
            try:
                tensor = TensorPolicy(_FORMAT, TensorScale(values), source)
            except ScaleError as error:
                raise ScaleError(f"{path}: scaling_factor of layer {name}: {error}") from error
            policy[int(name)] = LayerPolicy(tensor, tensor)
        return policy


def is_legacy_document(document: object) -> bool:
    """Whether a JSON file's content is of this kind."""
    return isinstance(document, dict) and "kv_cache" in document and "layers" not in document
