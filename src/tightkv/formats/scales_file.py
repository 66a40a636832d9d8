"""The scales file: one JSON that says how K and V of each layer are stored, and for which model.

docs/calibration.md is its specification.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tightkv.errors import ScaleError, TightKVError
from tightkv.files import atomic_file
from tightkv.formats.registry import KV_CACHE_DTYPES, canonical, needs_scale, resolve_format
from tightkv.formats.scales import KVCachePolicy, LayerPolicy, TensorPolicy, TensorScale

__all__ = [
    "LayerEntry",
    "ModelEntry",
    "Provenance",
    "ScalesFile",
    "TensorEntry",
    "as_scales_file",
    "parse_json",
    "read_scales_file",
    "write_scales_file",
]

SCHEMA_VERSION = 1
_NAMES = tuple(name for name in KV_CACHE_DTYPES if name != "auto")
_INNERMOST_LIST = re.compile(r"\[[^\[\]{}]*\]")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelEntry(_Strict):
    """For which model the scales were made.

    Attributes:
        architecture: name of its class.
        num_layers: layers that store K and V.
        weights: SHA-256 of sampled bytes of the checkpoint, as `ModelIdentity.weights`.
    """

    architecture: str
    num_layers: int = Field(ge=1)
    weights: str = Field(pattern=r"^[0-9a-f]{64}$")


class Provenance(_Strict):
    """Who made the scales, and from what.

    Attributes:
        tool: name and version.
        method: in words.
        data: files, data set, or "self".
        data_sha256: of the texts that were read.
        num_tokens: tokens whose K and V were measured.
        num_held_out_tokens: tokens on which the errors in the file were measured.
        options: settings of the method.
    """

    tool: str
    method: str
    data: tuple[str, ...] = Field(strict=False)
    data_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    num_tokens: int = Field(ge=0)
    num_held_out_tokens: int = Field(ge=0)
    options: dict[str, str | int | float | bool | None] = {}


class TensorEntry(_Strict):
    """K or V of one layer.

    Attributes:
        format: a `kv_cache_dtype`, not "auto".
        granularity: of the scale; absent without one.
        dynamic: whether a dynamic scale per token and head goes on top of the static one.
        scale: one number, `[num_kv_heads]`, or `[num_kv_heads][size]`, by granularity.
        clip_rate: share of the held-out values that were clipped.
        attention_error: squared error of attention's output on held-out text, as a share of the
            output's square, with this tensor quantized and the other one not.
    """

    format: Literal[_NAMES]  # type: ignore[valid-type]
    granularity: Literal["tensor", "head", "channel"] | None = None
    dynamic: bool = False
    scale: Any = None  # checked below: of a union pydantic reports every branch
    clip_rate: float | None = Field(default=None, ge=0, le=1)
    attention_error: float | None = Field(default=None, ge=0)

    @classmethod
    def of(cls, policy: TensorPolicy, **measured: float) -> TensorEntry:
        """The entry of a policy whose dtype is not "auto"."""
        scale = policy.scale
        return cls(
            format=canonical(policy.kv_cache_dtype),
            granularity=None if scale is None else scale.granularity.value,
            dynamic=scale is not None and scale.dynamic,
            scale=None if scale is None else _short_numbers(scale.values),
            **measured,
        )

    def policy(self, num_kv_heads: int, size: int, source: str = "") -> TensorPolicy:
        """What the entry says.

        Raises:
            TightKVError: if it does not fit the layer, or its format.
        """
        scale = self._tensor_scale()
        if scale is not None:
            scale.per_channel(num_kv_heads, size)
        resolve_format(self.format, torch.float32, scale)
        return TensorPolicy(self.format, scale, source)

    def _tensor_scale(self) -> TensorScale | None:
        if self.scale is None:
            if needs_scale(self.format):
                raise ScaleError(
                    f"format {self.format!r} has no scale: give one, or write "
                    f"{canonical(self.format).removesuffix('_e4m3')}_per_token_head."
                )
            if self.granularity is not None or self.dynamic:
                raise ScaleError("granularity and dynamic belong to a scale, but there is none.")
            return None
        values = torch.tensor(_as_numbers(self.scale), dtype=torch.float32)
        scale = TensorScale(values, self.dynamic)
        if scale.granularity.value != self.granularity:
            raise ScaleError(
                f"granularity is {self.granularity!r}, but scale is given per "
                f"{scale.granularity.value}: make them agree."
            )
        return scale


class LayerEntry(_Strict):
    """One layer: its shape, and how its K and V are stored."""

    num_kv_heads: int = Field(ge=1)
    head_size: int = Field(ge=1)
    value_size: int = Field(ge=1)
    k: TensorEntry
    v: TensorEntry

    def policy(self, source: str = "") -> LayerPolicy:
        """What the entry says; `source` is for the log."""
        return LayerPolicy(
            self._tensor("k", self.k, self.head_size, source),
            self._tensor("v", self.v, self.value_size, source),
        )

    def _tensor(self, name: str, entry: TensorEntry, size: int, source: str) -> TensorPolicy:
        try:
            return entry.policy(self.num_kv_heads, size, source)
        except TightKVError as error:
            raise ScaleError(f"{name}: {error}") from error

    @model_validator(mode="after")
    def _is_usable(self) -> LayerEntry:
        try:
            self.policy()
        except TightKVError as error:
            raise ValueError(str(error)) from error
        return self


class ScalesFile(_Strict):
    """All of it."""

    schema_version: Literal[1]
    model: ModelEntry
    made_by: Provenance
    layers: dict[str, LayerEntry]

    @model_validator(mode="after")
    def _layers_are_numbered(self) -> ScalesFile:
        wrong = [name for name in self.layers if not re.fullmatch(r"0|[1-9][0-9]{0,5}", name)]
        if wrong:
            raise ValueError(f"layers has the key {wrong[0]!r}: keys are layer indices.")
        if len(self.layers) != self.model.num_layers:
            raise ValueError(
                f"layers has {len(self.layers)} entries, but model.num_layers is "
                f"{self.model.num_layers}: make them agree."
            )
        return self

    def policy(self, source: str) -> KVCachePolicy:
        """How each layer is stored; `source` names the file in the log."""
        return {int(name): entry.policy(source) for name, entry in self.layers.items()}


def read_scales_file(path: Path) -> ScalesFile:
    """Read and check a scales file.

    Raises:
        ScaleError: one sentence that names the file, and where in it something is wrong.
    """
    return as_scales_file(path, parse_json(path))


def as_scales_file(path: Path, document: object) -> ScalesFile:
    """Check what a JSON file contained; errors as in `read_scales_file`."""
    try:
        return ScalesFile.model_validate(document)
    except ValidationError as error:
        raise ScaleError(f"{path}: {_first_problem(error)}") from None


def parse_json(path: Path) -> object:
    """The content of a JSON file; a key may occur only once.

    Raises:
        ScaleError: if it cannot be read, or is no JSON.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ScaleError(
            f"The scales file {path} cannot be read ({error.strerror}): check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise ScaleError(f"{path} is not UTF-8 text: give a scales file.") from error
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ScaleError(
            f"{path} is nested too deeply for a scales file: calibrate anew."
        ) from None
    except ValueError as error:
        raise ScaleError(f"{path} is not valid JSON ({error}): calibrate anew.") from None


def write_scales_file(path: Path, content: ScalesFile) -> None:
    """Write the file, whole or not at all.

    Raises:
        OutputError: if it cannot be written.
    """
    text = json.dumps(content.model_dump(mode="json", exclude_none=True), indent=2)
    text = _INNERMOST_LIST.sub(lambda match: " ".join(match[0].split()), text)
    with atomic_file(path) as file:
        file.write(text.encode() + b"\n")


def _short_numbers(values: torch.Tensor) -> Any:
    """Nested lists of the shortest decimals that give the same float32."""
    if values.dim():
        return [_short_numbers(row) for row in values]
    return float(str(numpy.float32(values.item())))


def _as_numbers(scale: Any, where: str = "scale", depth: int = 0) -> Any:
    """The scale with floats; ragged or foreign content is named by its place."""
    if isinstance(scale, list):
        rows = [_as_numbers(row, f"{where}[{i}]", depth + 1) for i, row in enumerate(scale)]
        lengths = {len(row) if isinstance(row, list) else None for row in rows}
        if depth > 1 or len(lengths) != 1:
            raise ScaleError(
                f"{where} is no number, no list of numbers and no rows of equal length: one of "
                "these is needed."
            )
        return rows
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise ScaleError(f"{where}{_shown(scale)}: every scale must be a number.")
    try:
        return float(scale)
    except OverflowError:
        raise ScaleError(f"{where} is too large: every scale must be finite.") from None


def _unique(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    given = (
        "" if problem["type"] in ("missing", "value_error") else f"; it{_shown(problem['input'])}"
    )
    if problem["type"] == "value_error":  # a sentence of ours; "k: …" goes on with the place
        joint = "." if message[1:3] == ": " else ": " if where else ""
        return f"{where}{joint}{message}."
    return f"{where}{': ' if where else ''}{message}{given}: correct it."


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f" is a JSON {'object' if isinstance(value, dict) else 'array'}"
    text = repr(value)
    return f" is {text if len(text) <= 60 else text[:57] + '...'}"
