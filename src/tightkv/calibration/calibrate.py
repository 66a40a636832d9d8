"""From a model and some text to a scales file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tightkv.calibration.candidates import GranularityChoice, Method, MethodName
from tightkv.calibration.data import CalibrationText, Document, cut_windows
from tightkv.calibration.places import Place, spread
from tightkv.calibration.progress import Progress, no_progress
from tightkv.calibration.search import Choice, Search
from tightkv.calibration.self_text import write_text
from tightkv.calibration.statistics import LayerStatistics, TensorStatistics, gather_statistics
from tightkv.config import CacheConfig, DeviceConfig, ModelConfig
from tightkv.engine.devices import resolve_device
from tightkv.engine.observed_model import ObservedModel
from tightkv.engine.policy import check_skip_layers, dtypes_of, layer_ranges, skipped_layers
from tightkv.errors import ConfigError, RequestError
from tightkv.files import check_target
from tightkv.formats import (
    LayerEntry,
    ModelEntry,
    Provenance,
    ScalesFile,
    TensorEntry,
    TensorPolicy,
    write_scales_file,
)
from tightkv.formats.registry import KV_CACHE_DTYPES, dtype_name, takes_scales
from tightkv.kernels import select_backend
from tightkv.models import LoadedModel, ModelGeometry, load_model, prepare_model

__all__ = ["Calibration", "LayerReport", "calibrate", "get_kv_cache_scales"]

_MIN_PLACES = 16
_MIN_HELD_OUT_PLACES = 4
_MAX_HELD_OUT_WINDOWS = 8
# One plain 8-bit scale hurts a layer if it loses this share of attention's squared output, or a
# smaller one where a channel is so many times as loud as the median. (SmolLM2: at most 0.34 % and
# 7 times; with channels of K made 30 times as loud from 0.5 %, and 25 times on.)
_HURT = 0.01
_HURT_BY_OUTLIERS = 0.001
_OUTLIER_RATIO = 15.0
# Static scales that lose so many times what dynamic ones lose should not be used.
_MUCH_WORSE = 4.0


@dataclass(frozen=True, slots=True)
class TensorReport:
    """K or V of one layer: what it is like, and what was chosen; None where it has no scale."""

    statistics: TensorStatistics
    choice: Choice | None


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer."""

    layer_idx: int
    k: TensorReport
    v: TensorReport


@dataclass(frozen=True, slots=True)
class Calibration:
    """A scales file and what was seen while it was made.

    Attributes:
        remarks: sentences for the user: layers that 8 bits would hurt, scales that should not be
            used.
    """

    file: ScalesFile
    layers: tuple[LayerReport, ...]
    remarks: tuple[str, ...]


def get_kv_cache_scales(
    model_path: str | LoadedModel,
    calibration_texts: Sequence[Document] | None = None,
    output_path: str | Path | None = None,
    *,
    progress: Progress = no_progress,
    **options: Any,
) -> ScalesFile:
    """Calibrate the KV cache of a model; what `tightkv calibrate` does.

    Args:
        model_path: Hugging Face folder or hub id, GGUF file, or a loaded model.
        calibration_texts: texts, or conversations of `{"role": ..., "content": ...}`; None: the
            model writes its own.
        output_path: file to write; None: none.
        progress: told how far it is.
        options: those of `calibrate`.

    Returns:
        What the file contains.

    Raises:
        TightKVError: for text, options or a model that cannot be used; no file is then written.
    """
    if output_path is not None:
        check_target(Path(output_path))
    result = calibrate(model_path, calibration_texts, progress=progress, **options)
    if output_path is not None:
        write_scales_file(Path(output_path), result.file)
    return result.file


def calibrate(
    model: str | LoadedModel | ModelConfig,
    texts: Sequence[Document] | None = None,
    *,
    static: bool = False,
    granularity: GranularityChoice = "auto",
    method: MethodName = "absmax",
    margin: float | None = None,
    kv_cache_dtype: str = "int8",
    k_cache_dtype: str | None = None,
    v_cache_dtype: str | None = None,
    kv_cache_dtype_skip_layers: Sequence[str] = (),
    num_samples: int = 64,
    max_seq_len: int = 512,
    max_model_len: int | None = None,
    seed: int = 0,
    sources: Sequence[str] = ("texts",),
    progress: Progress = no_progress,
) -> Calibration:
    """Measure K and V on text, and choose scales by attention's error on held-out text.

    Args:
        model: Hugging Face folder or hub id, GGUF file, its configuration, or a loaded model.
        texts: texts or conversations; None: the model writes its own.
        static: scales without a dynamic part (8.0 bits per value); otherwise the two-factor form.
        granularity: of static scales: "tensor", "head", "channel", or "auto", layer by layer the
            one with the least error.
        method: of static scales: "absmax", "percentile" (99.99), or "mse" (the clip with the least
            error of attention's output).
        margin: static scales times this; None: the best of some.
        kv_cache_dtype: format of K and V.
        k_cache_dtype: format of K alone.
        v_cache_dtype: format of V alone.
        kv_cache_dtype_skip_layers: layers that stay in the model's data type.
        num_samples: windows of text.
        max_seq_len: tokens of a window.
        max_model_len: positions that will be served, over which windows are spread; None: as many
            as the model knows.
        seed: of the choice of windows, and of text that the model writes.
        sources: where the texts are from, for the file.
        progress: told how far it is.

    Raises:
        ConfigError: for options that contradict each other or the model.
        RequestError: for text that cannot be used.
    """
    cache = CacheConfig(
        kv_cache_dtype=kv_cache_dtype,
        k_cache_dtype=k_cache_dtype,
        v_cache_dtype=v_cache_dtype,
        kv_cache_dtype_skip_layers=tuple(kv_cache_dtype_skip_layers),
    )
    how = Method(static, granularity, method, margin)
    _check_cache(cache)
    loaded = _load(model, resolve_device(DeviceConfig()))
    geometry = prepare_model(loaded.model)
    skipped = skipped_layers(cache, geometry)  # refused before any work
    text = (
        write_text(loaded, num_samples, max_seq_len, seed, progress)
        if texts is None
        else cut_windows(texts, loaded, sources, num_samples, max_seq_len, seed)
    )
    positions = max_model_len or loaded.max_position
    places = (
        spread(text.measured, positions, _MIN_PLACES),
        spread(text.held_out[:_MAX_HELD_OUT_WINDOWS], positions, _MIN_HELD_OUT_PLACES),
    )
    statistics, choices = _measure_and_choose(loaded, geometry, cache, how, places, progress)
    reports = _reports(statistics, choices)
    made_by = _provenance(how, text, max_seq_len, positions, seed)
    file = _file(loaded, geometry, cache, skipped, choices, made_by)
    return Calibration(file, reports, tuple(_remarks(reports, how)))


def _measure_and_choose(
    model: LoadedModel,
    geometry: ModelGeometry,
    cache: CacheConfig,
    method: Method,
    places: tuple[Sequence[Place], Sequence[Place]],
    progress: Progress,
) -> tuple[dict[int, LayerStatistics], dict[tuple[int, str], Choice]]:
    """Statistics on the first places, choices on the second ones."""
    device = model.model.device
    backend = select_backend(device)
    longest = max(len(place.token_ids) for some in places for place in some)
    observed = ObservedModel(model, geometry, backend, device, longest)
    statistics = gather_statistics(observed, places[0], progress)
    _check_statistics(statistics)
    skipped = skipped_layers(cache, geometry)
    layers = [layer for layer in geometry.layers if layer.layer_idx not in skipped]
    dtypes = dict(zip("kv", dtypes_of(cache), strict=True))
    search = Search(method, dtypes, layers, statistics, backend)
    return statistics, search.run(observed, places[1], progress)


def _check_cache(cache: CacheConfig) -> None:
    for dtype in (cache.kv_cache_dtype, *dtypes_of(cache)):
        if dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"Unknown KV cache dtype {dtype!r}: choose one of {', '.join(KV_CACHE_DTYPES)}."
            )
    if not any(map(takes_scales, dtypes_of(cache))):
        raise ConfigError(
            f"Neither {' nor '.join(dtypes_of(cache))} takes scales, so there is nothing to "
            "calibrate: choose int8, fp8_e4m3 or fp8_e5m2 for K or V."
        )
    check_skip_layers(cache)


def _load(model: str | LoadedModel | ModelConfig, device: torch.device) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    return load_model(ModelConfig(model=model) if isinstance(model, str) else model, device)


def _check_statistics(statistics: dict[int, LayerStatistics]) -> None:
    for layer, of in sorted(statistics.items()):
        for name, tensor in (("K", of.k), ("V", of.v)):
            largest = float(tensor.range.max())
            if not math.isfinite(largest):
                raise RequestError(
                    f"{name} of layer {layer} is not finite on this text: the model cannot be "
                    "calibrated in this data type; try --dtype float32."
                )
            if largest == 0:
                raise RequestError(
                    f"{name} of layer {layer} is zero on all of this text: give other text, or "
                    "check the model's weights."
                )


def _reports(
    statistics: Mapping[int, LayerStatistics], choices: Mapping[tuple[int, str], Choice]
) -> tuple[LayerReport, ...]:
    return tuple(
        LayerReport(
            layer,
            TensorReport(of.k, choices.get((layer, "k"))),
            TensorReport(of.v, choices.get((layer, "v"))),
        )
        for layer, of in sorted(statistics.items())
    )


def _file(
    model: LoadedModel,
    geometry: ModelGeometry,
    cache: CacheConfig,
    skipped: set[int],
    choices: Mapping[tuple[int, str], Choice],
    made_by: Provenance,
) -> ScalesFile:
    plain = dtype_name(model.dtype)
    dtypes = [plain if dtype == "auto" else dtype for dtype in dtypes_of(cache)]

    def tensor(layer: int, name: str, dtype: str) -> TensorEntry:
        choice = choices.get((layer, name))
        if choice is None:
            return TensorEntry.of(TensorPolicy(plain if layer in skipped else dtype))
        error = choice.error
        return TensorEntry.of(
            choice.policy, clip_rate=error.clip_rate, attention_error=error.relative
        )

    return ScalesFile(
        schema_version=1,
        model=ModelEntry(
            architecture=model.identity.architecture,
            num_layers=len(geometry.layers),
            weights=model.identity.weights,
        ),
        made_by=made_by,
        layers={
            str(layer.layer_idx): LayerEntry(
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                value_size=layer.value_size,
                k=tensor(layer.layer_idx, "k", dtypes[0]),
                v=tensor(layer.layer_idx, "v", dtypes[1]),
            )
            for layer in geometry.layers
        },
    )


def _provenance(
    method: Method, text: CalibrationText, max_seq_len: int, max_model_len: int, seed: int
) -> Provenance:
    return Provenance(
        tool=f"tightkv {version('tightkv')}",
        method=method.describe(),
        data=text.sources,
        data_sha256=text.sha256,
        num_tokens=text.num_tokens,
        num_held_out_tokens=text.num_held_out_tokens,
        options={
            "max_seq_len": max_seq_len,
            "max_model_len": max_model_len,
            "seed": seed,
            "margin": method.margin,
        },
    )


def _remarks(reports: Sequence[LayerReport], method: Method) -> Iterator[str]:
    for name in "kv":
        of_layer: dict[int, TensorReport] = {of.layer_idx: getattr(of, name) for of in reports}
        hurt = {
            layer: of.choice
            for layer, of in of_layer.items()
            if of.choice and _is_hurt(of, of.choice)
        }
        if hurt:
            most = max(choice.plain_error.relative for choice in hurt.values())
            yield (
                f"{name.upper()} of layers {layer_ranges(hurt)} has outliers: one 8-bit scale for "
                f"all of it would lose up to {most:.2%} of attention's output there."
            )
        lost = [layer for layer, choice in hurt.items() if choice.error.relative > _HURT]
        if lost:
            yield (
                f"The scales chosen here lose more than {_HURT:.0%} in layers "
                f"{layer_ranges(lost)}: keep them in a wider format with "
                "--kv-cache-dtype-skip-layers, or leave --static out."
            )
    choices = [choice for of in reports for choice in (of.k.choice, of.v.choice) if choice]
    if method.static and choices:
        chosen = sum(choice.error.relative for choice in choices)
        dynamic = sum(choice.dynamic_error.relative for choice in choices)
        if chosen > _MUCH_WORSE * dynamic:
            yield (
                f"Static scales lose {chosen / max(dynamic, 1e-30):.0f} times what dynamic scales "
                "lose on this model: leave --static out."
            )


def _is_hurt(report: TensorReport, choice: Choice) -> bool:
    lost = choice.plain_error.relative
    has_outliers = report.statistics.outlier_ratio > _OUTLIER_RATIO
    return lost > (_HURT_BY_OUTLIERS if has_outliers else _HURT)
