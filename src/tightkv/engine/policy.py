"""How K and V of each layer are stored: from flags, a scales file, the checkpoint or a probe."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tightkv.config import CacheConfig
from tightkv.errors import ConfigError, ScaleError
from tightkv.formats import (
    KVCachePolicy,
    KVCacheScales,
    LayerPolicy,
    LayerScales,
    ScalesFile,
    TensorPolicy,
)
from tightkv.formats.legacy_scales import LegacyScales, is_legacy_document
from tightkv.formats.registry import canonical, takes_scales, wants_probe
from tightkv.formats.scales_file import as_scales_file, parse_json
from tightkv.models import CheckpointScales, LayerGeometry, ModelGeometry, ModelIdentity

__all__ = [
    "PolicySources",
    "check_skip_layers",
    "dtypes_of",
    "layer_ranges",
    "log_sources",
    "probed_layers",
    "resolve_policy",
    "scales_of",
    "skipped_layers",
    "with_probe",
]

_logger = logging.getLogger("tightkv")

_SKIPPED = TensorPolicy("auto", source="kv_cache_dtype_skip_layers")
_WINDOWED = "sliding_window"


@dataclass(frozen=True)
class PolicySources:
    """What may decide, besides the flags.

    Attributes:
        path: of the file, as it was given; for messages.
        file: the scales file.
        checkpoint: scales that came with the model.
    """

    path: str | None = None
    file: ScalesFile | LegacyScales | None = None
    checkpoint: CheckpointScales | None = None

    @classmethod
    def read(cls, cache: CacheConfig) -> PolicySources:
        """Read the file that the configuration names, if it names one.

        Raises:
            ScaleError: if it is not usable, whatever the model.
            ConfigError: if other settings contradict it.
        """
        path = cache.quantization_config_path
        if path is None:
            return cls()
        if cache.kv_cache_scales:
            raise ConfigError(
                f"There are kv_cache_scales and a quantization_config_path ({path}): give one."
            )
        file = Path(path).expanduser()
        document = parse_json(file)
        if is_legacy_document(document):
            return cls(path, LegacyScales.parse(file, document))
        return cls(path, as_scales_file(file, document))

    def check_identity(self, identity: ModelIdentity) -> None:
        """Refuse a file of another model.

        Raises:
            ScaleError: names what differs.
        """
        if isinstance(self.file, ScalesFile):
            made_for = self.file.model
            facts: tuple[tuple[str, str, str], ...] = (
                ("model.architecture", identity.architecture, made_for.architecture),
                ("model.weights", identity.weights, made_for.weights),
            )
        elif self.file is not None and self.file.model_type is not None:
            facts = (("model_type", identity.model_type, self.file.model_type),)
        else:
            return
        for field, expected, given in facts:
            if expected != given:
                raise ScaleError(
                    f"{self.path}: {field} is {given!r}, but this model's is {expected!r}: "
                    "the file was made for another model; calibrate this one."
                )


def resolve_policy(
    cache: CacheConfig, geometry: ModelGeometry, sources: PolicySources
) -> dict[int, LayerPolicy]:
    """Formats and scales of every layer; what a probe must add still lacks its scale.

    Raises:
        ConfigError: for a skipped layer that the model does not have, or a flag that contradicts
            the file.
        ScaleError: for scales that are missing, surplus or of the wrong shape.
    """
    skipped = skipped_layers(cache, geometry)
    policy = dict(_unskipped_policy(cache, geometry, sources, skipped))
    policy |= dict.fromkeys(skipped, LayerPolicy(_SKIPPED, _SKIPPED))
    for layer in geometry.layers:
        _check_shapes(layer, policy[layer.layer_idx])
    return policy


def probed_layers(policy: KVCachePolicy) -> list[int]:
    """Layers whose K or V needs channel factors of a probe."""
    return [layer for layer, of in policy.items() if _wants_probe(of.k) or _wants_probe(of.v)]


def with_probe(policy: KVCachePolicy, factors: KVCacheScales) -> dict[int, LayerPolicy]:
    """The policy with the probe's factors where they are wanted."""

    def filled(tensor: TensorPolicy, scales: LayerScales, name: str) -> TensorPolicy:
        if not _wants_probe(tensor):
            return tensor
        return replace(tensor, scale=getattr(scales, name), source="probe")

    return {
        layer: LayerPolicy(
            filled(of.k, factors.get(layer, LayerScales()), "k"),
            filled(of.v, factors.get(layer, LayerScales()), "v"),
        )
        for layer, of in policy.items()
    }


def scales_of(policy: KVCachePolicy) -> dict[int, LayerScales]:
    """The static scales alone."""
    return {layer: LayerScales(of.k.scale, of.v.scale) for layer, of in policy.items()}


def log_sources(policy: KVCachePolicy, sources: PolicySources) -> None:
    """Say where the scales of each layer come from."""
    layers: dict[tuple[str, str], list[int]] = {}
    for layer, of in policy.items():
        layers.setdefault((of.k.source or "none", of.v.source or "none"), []).append(layer)
    parts = [
        f"layers {layer_ranges(members)}: {k if k == v else f'K {k}, V {v}'}"
        for (k, v), members in layers.items()
        if (k, v) != ("none", "none")
    ]
    if parts:
        _logger.info("Source of formats and scales: %s", "; ".join(parts))
    if any("probe" in pair for pair in layers):
        _logger.info(
            "int8 without a scales file: channel factors from a probe of 256 random tokens; "
            "`tightkv calibrate` measures them on text, which is more exact"
        )
    checkpoint = sources.checkpoint
    if checkpoint is not None and not any("checkpoint" in pair for pair in layers):
        _logger.info(
            "The checkpoint has %s scales for layers %s, which are not used: "
            "--kv-cache-dtype %s would use them",
            checkpoint.kv_cache_dtype,
            layer_ranges(checkpoint.layers),
            checkpoint.kv_cache_dtype,
        )


def check_skip_layers(cache: CacheConfig) -> None:
    """Raise ConfigError for an entry of kv_cache_dtype_skip_layers that names no layers."""
    for entry in cache.kv_cache_dtype_skip_layers:
        if entry != _WINDOWED:
            _named_layers(entry, 0)


def layer_ranges(indices: Iterable[int]) -> str:
    """[0, 1, 2, 5] → "0-2, 5"."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def _unskipped_policy(
    cache: CacheConfig, geometry: ModelGeometry, sources: PolicySources, skipped: set[int]
) -> KVCachePolicy:
    layers = {layer.layer_idx for layer in geometry.layers}
    if sources.file is not None:
        policy = _file_policy(sources.file, str(sources.path), geometry)
        _check_layers(f"{sources.path}: layers", policy, layers, skipped)
        _check_flags(cache, policy, str(sources.path), skipped)
        return policy
    if cache.kv_cache_scales:
        scales: KVCacheScales = cache.kv_cache_scales
        _check_given(cache, scales, layers, skipped)
        return _from_flags(cache, layers, scales, "kv_cache_scales")
    checkpoint = sources.checkpoint
    if checkpoint is not None and checkpoint.kv_cache_dtype in map(canonical, dtypes_of(cache)):
        dtype = checkpoint.kv_cache_dtype
        _check_complete(cache, checkpoint.layers, layers - skipped, "The checkpoint", dtype)
        return _from_flags(cache, layers, checkpoint.layers, "checkpoint", dtype)
    return _from_flags(cache, layers, {}, "")


def _file_policy(
    file: ScalesFile | LegacyScales, path: str, geometry: ModelGeometry
) -> KVCachePolicy:
    source = Path(path).name
    if isinstance(file, ScalesFile):
        return file.policy(source)
    num_kv_heads = {layer.layer_idx: layer.num_kv_heads for layer in geometry.layers}
    return file.policy(path, source, num_kv_heads)


def dtypes_of(cache: CacheConfig) -> tuple[str, str]:
    """What was asked for K and for V."""
    return cache.k_cache_dtype or cache.kv_cache_dtype, cache.v_cache_dtype or cache.kv_cache_dtype


def _from_flags(
    cache: CacheConfig,
    layers: set[int],
    scales: KVCacheScales,
    source: str,
    only: str | None = None,
) -> KVCachePolicy:
    """The flags' formats; scales go where the format takes some (and is `only`, if given)."""

    def tensor(dtype: str, scale: object) -> TensorPolicy:
        fits = takes_scales(dtype) and only in (None, canonical(dtype))
        if scale is None or not (fits or only is None):
            return TensorPolicy(dtype)
        return TensorPolicy(dtype, scale, source)  # type: ignore[arg-type]

    k_dtype, v_dtype = dtypes_of(cache)
    return {
        layer: LayerPolicy(
            tensor(k_dtype, scales.get(layer, LayerScales()).k),
            tensor(v_dtype, scales.get(layer, LayerScales()).v),
        )
        for layer in layers
    }


def _check_layers(
    what: str, given: Mapping[int, object], layers: set[int], skipped: set[int]
) -> None:
    surplus, missing = set(given) - layers, layers - set(given) - skipped
    if surplus or missing:
        problem = "has" if surplus else "lacks"
        raise ScaleError(
            f"{what} {problem} {layer_ranges(surplus or missing)}, but the model stores K and V in "
            f"layers {layer_ranges(layers)}: it was made for another model; calibrate this one."
        )


def _check_flags(cache: CacheConfig, policy: KVCachePolicy, path: str, skipped: set[int]) -> None:
    """A flag that was given must say what the file says."""
    for name, dtype in zip("kv", dtypes_of(cache), strict=True):
        if dtype == CacheConfig().kv_cache_dtype:
            continue
        for layer, of in sorted(policy.items()):
            stored = getattr(of, name).kv_cache_dtype
            if layer not in skipped and canonical(dtype) != canonical(stored):
                raise ConfigError(
                    f"{path}: layers.{layer}.{name}.format is {stored!r}, but the flags ask for "
                    f"{dtype!r}: leave the flag out, or give another file."
                )


def _check_given(
    cache: CacheConfig, scales: KVCacheScales, layers: set[int], skipped: set[int]
) -> None:
    surplus = set(scales) - layers
    if surplus:
        raise ScaleError(
            f"There are scales for layers {layer_ranges(surplus)}, which store no K and V in this "
            "model: they were made for another model."
        )
    both = sorted(skipped & set(scales))
    if both:
        raise ScaleError(
            f"Layer {both[0]} is in kv_cache_dtype_skip_layers and has scales too: remove one of "
            "them."
        )
    if not any(map(takes_scales, dtypes_of(cache))):
        raise ScaleError(
            f"There are scales, but neither {' nor '.join(dtypes_of(cache))} takes any: leave them "
            "out, or choose int8, fp8_e4m3 or fp8_e5m2."
        )
    _check_complete(cache, scales, layers - skipped, "kv_cache_scales")


def _check_complete(
    cache: CacheConfig,
    scales: KVCacheScales,
    layers: set[int],
    owner: str,
    only: str | None = None,
) -> None:
    for name, dtype in zip("kv", dtypes_of(cache), strict=True):
        if not takes_scales(dtype) or only not in (None, canonical(dtype)):
            continue
        for layer in sorted(layers):
            if getattr(scales.get(layer, LayerScales()), name) is None:
                raise ScaleError(
                    f"{owner} has scales, but none for {name.upper()} of layer {layer}: add them, "
                    "or skip the layer."
                )


def _check_shapes(layer: LayerGeometry, of: LayerPolicy) -> None:
    for name, tensor, size in (("K", of.k, layer.head_size), ("V", of.v, layer.value_size)):
        if tensor.scale is None:
            continue
        try:
            tensor.scale.per_channel(layer.num_kv_heads, size)
        except ScaleError as error:
            raise ScaleError(
                f"{name} of layer {layer.layer_idx} ({tensor.source}): {error}"
            ) from error


def _wants_probe(tensor: TensorPolicy) -> bool:
    return tensor.scale is None and wants_probe(tensor.kv_cache_dtype)


def skipped_layers(cache: CacheConfig, geometry: ModelGeometry) -> set[int]:
    """What kv_cache_dtype_skip_layers names.

    Raises:
        ConfigError: for a layer that the model does not have.
    """
    known = {layer.layer_idx for layer in geometry.layers}
    num_layers = max([*known, *geometry.kv_sources]) + 1
    skipped: set[int] = set()
    for entry in cache.kv_cache_dtype_skip_layers:
        if entry == _WINDOWED:
            named: Sequence[int] = [g.layer_idx for g in geometry.layers if g.sliding_window]
            problem = "this model has no layer with a sliding window"
        else:
            named = _named_layers(entry, num_layers)
            problem = f"the layers with a cache are {layer_ranges(known)}"
        if not named or any(layer not in known for layer in named):
            raise ConfigError(
                f"kv_cache_dtype_skip_layers has {entry}, but {problem}: choose among them, or "
                "count from the end with -1."
            )
        skipped.update(named)
    return skipped


def _named_layers(entry: str, num_layers: int) -> Sequence[int]:
    """Indices of "3", "-1" or "0-7"."""
    match = re.fullmatch(r"(\d+)-(\d+)", entry)
    if match is not None and int(match[1]) <= int(match[2]):
        return range(int(match[1]), int(match[2]) + 1)
    if match is None and re.fullmatch(r"-?\d+", entry):
        return [int(entry) + (num_layers if entry.startswith("-") else 0)]
    raise ConfigError(
        f"kv_cache_dtype_skip_layers has {entry!r}: give layer indices, as 0 1 -1, ranges, as 0-7, "
        "or sliding_window."
    )
