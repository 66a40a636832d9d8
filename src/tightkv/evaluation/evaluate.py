"""From a model, cache precisions and the user's text to a report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tightkv.calibration.data import Document, read_documents
from tightkv.calibration.progress import Progress, no_progress
from tightkv.config import (
    DeviceConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    unknown_option,
)
from tightkv.engine.arm_spec import parse_arms
from tightkv.engine.devices import resolve_device
from tightkv.engine.policy import layer_ranges
from tightkv.engine.sampling_params import SamplingParams
from tightkv.errors import ConfigError, RequestError
from tightkv.evaluation.arms import Arm, Arms, ArmSpec, make_arm, parse_arm
from tightkv.evaluation.data import EvaluationText, cut_text
from tightkv.evaluation.fidelity import measure_fidelity, measure_layer_groups, measure_noise_floor
from tightkv.evaluation.generation import generate_answers, measure_generation
from tightkv.evaluation.journal import Journal
from tightkv.evaluation.layers import measure_layers
from tightkv.evaluation.render import write_report
from tightkv.evaluation.report import (
    ArmReport,
    DataEntry,
    EvaluationReport,
    LayerGroupFigures,
    RetrievalCell,
    RetrievalFigures,
    Thresholds,
)
from tightkv.evaluation.retrieval import measure_retrieval
from tightkv.evaluation.tasks import Task, parse_tasks, run_task
from tightkv.evaluation.verdict import judge
from tightkv.files import check_folder
from tightkv.kernels import Backend
from tightkv.metrics import DivergenceFigures
from tightkv.models import LoadedModel, load_model, prepare_model

__all__ = ["evaluate"]

_MAX_NUM_SEQS = 16
_MAX_NUM_BATCHED_TOKENS = 512
_OTHER_CUT = 48
"""Tokens of a step for the noise floor, whose chunks end elsewhere than with 512."""
_NOISE_TOKENS = 256
_MAX_SEQ_LEN = 2048
_TASK_LEN = 4096
_ANSWER_ROOM = 64
"""Tokens besides a window, or besides a text with a hidden sentence."""
_BUCKETS = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_OWN_TEXT = "Python's documentation"


def evaluate(
    model: str | LoadedModel | ModelConfig,
    formats: str | Sequence[str] = "int8",
    data: str | Path | Sequence[Document] | None = None,
    tasks: Sequence[str] = (),
    *,
    output_dir: str | Path | None = None,
    sources: Sequence[str] = ("data",),
    progress: Progress = no_progress,
    backend: Backend | None = None,
    **options: Any,
) -> EvaluationReport:
    """Measure what cache precisions cost; what `tightkv eval` does.

    Args:
        model: Hugging Face folder or hub id, GGUF file, its configuration, or a loaded model.
        formats: cache precisions, as "int8", "int8@scales.json", "auto@scales.json", or K and V
            apart, "int8/fp8_e4m3"; a list, or one string with commas.
        data: a file, or texts and conversations; None: technical prose that comes with Python.
        tasks: as "gsm8k=problems.jsonl".
        output_dir: folder for the reports, and for what an interrupted run had measured.
        sources: where texts and conversations are from, for the report.
        progress: told how far it is.
        backend: kernels; default: those of the device.
        options: fields of `tightkv.config.EvaluationConfig`.

    Raises:
        ConfigError: for an unknown option, or a precision that the model cannot have.
        RequestError: for text or tasks that cannot be used, or a folder of another run.
        OutputError: if a report cannot be written.
    """
    config = _config({**options, "tasks": tuple(tasks)})
    base, others = _specs(formats, config)
    wanted = parse_tasks(config)
    folder = None if output_dir is None else check_folder(Path(output_dir))
    documents, sources = _documents(data, sources, config)
    model_config, loaded = _load(model)
    config = _fitted(config, model_config.max_model_len or loaded.max_position)
    text = cut_text(documents, loaded, config)
    engine = _engine_config(config, model_config, loaded, text, has_tasks=bool(wanted))
    arms = Arms.make(engine, loaded, base, others, _pool_tokens(engine), backend)
    path = None if folder is None else folder / "progress.jsonl"
    journal = Journal(path, _digest(config, arms, text, wanted, loaded))
    run = _Run(config, engine, loaded, others, arms, journal, progress, backend)
    report = _report(run, text, wanted, sources)
    if folder is not None:
        write_report(report, folder)
    return report


@dataclass(frozen=True, slots=True)
class _Run:
    """What all measurements need."""

    config: EvaluationConfig
    engine: EngineConfig
    model: LoadedModel
    others: Sequence[ArmSpec]
    arms: Arms
    journal: Journal
    progress: Progress
    backend: Backend | None


def _report(
    run: _Run, text: EvaluationText, tasks: Sequence[Task], sources: Sequence[str]
) -> EvaluationReport:
    """Measure, in the order from short to long, and put it together."""
    arms, config = run.arms, run.config
    greedy = SamplingParams(temperature=0, max_tokens=config.max_tokens)
    answers = generate_answers(arms.base, text.prompts, greedy, run.journal, run.progress)
    windows = text.windows([answer.token_ids for answer in answers], config)
    fidelity = measure_fidelity(arms, windows, _BUCKETS, run.journal, run.progress)
    noise_floor = _noise_floor(run, windows[0])
    layers = measure_layers(arms, windows, run.journal, run.progress)
    groups = _layer_groups(run, windows)
    generation = [
        measure_generation(arms, text.prompts, params, run.journal, run.progress)
        for params in (greedy, *_sampled(config))
        if text.prompts
    ]
    cells, retrieval = _retrieval(run, [token for window in windows for token in window])
    task_figures = [run_task(task, arms, run.journal, run.progress) for task in tasks]
    thresholds = Thresholds(
        max_kld=config.max_kld,
        min_top1=config.min_top1,
        max_accuracy_drop=config.max_accuracy_drop,
    )

    def arm_report(arm: Arm) -> ArmReport:
        measured: dict[str, Any] = {
            "layer_groups": tuple(groups[arm.name]),
            "layers": layers[arm.name],
            "generation": tuple(figures[arm.name] for figures in generation),
            "tasks": tuple(figures for task in task_figures for figures in task[arm.name]),
            "retrieval": retrieval.get(arm.name),
        }
        verdict = judge(thresholds, fidelity[arm.name], baseline_retrieval=cells, **measured)
        return ArmReport(
            name=arm.name,
            cache=arm.figures(arms.base),
            fidelity=fidelity[arm.name],
            verdict=verdict,
            **measured,
        )

    return EvaluationReport(
        tool=f"tightkv {version('tightkv')}",
        model=_shown_name(run.model.name),
        architecture=run.model.identity.architecture,
        weights=run.model.identity.weights,
        baseline=arms.base.name,
        baseline_cache=arms.base.figures(arms.base),
        data=DataEntry(
            sources=tuple(sources),
            sha256=text.sha256,
            num_windows=len(windows),
            max_seq_len=max(map(len, windows)),
            num_prompts=len(text.prompts),
        ),
        options=json.loads(json.dumps(asdict(config))),  # as the file has them
        thresholds=thresholds,
        noise_floor=noise_floor,
        baseline_retrieval=cells,
        arms=tuple(map(arm_report, arms.others)),
    )


def _config(options: dict[str, Any]) -> EvaluationConfig:
    known = [option.name for option in fields(EvaluationConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(unknown_option(name, known))
    config = EvaluationConfig(**options)
    least = {"num_samples": 1, "prompt_len": 1, "max_tokens": 1, "retrieval_trials": 1}
    counts = {**least, "num_prompts": 0, "layer_groups": 0, "max_seq_len": 2, "task_limit": 1}
    for name, at_least in counts.items():
        value = getattr(config, name)
        if value is not None and value < at_least:
            raise ConfigError(f"{name} is {value}: it must be at least {at_least}.")
    shares = ("min_top1", "max_accuracy_drop")
    for name in (*shares, "max_kld", "temperature"):
        value = getattr(config, name)
        if not 0 <= value <= (1 if name in shares else float("inf")):
            most = " and at most 1" if name in shares else ""
            raise ConfigError(f"{name} is {value}: it must be at least 0{most}.")
    if min(config.retrieval_lengths, default=0) < 0:
        raise ConfigError(
            f"retrieval_lengths are {config.retrieval_lengths}: each must be at least 0."
        )
    if not all(0 <= depth <= 1 for depth in config.retrieval_depths):
        raise ConfigError(
            f"retrieval_depths are {config.retrieval_depths}: each must be from 0 to 1."
        )
    return config


def _specs(
    formats: str | Sequence[str], config: EvaluationConfig
) -> tuple[ArmSpec, tuple[ArmSpec, ...]]:
    """The baseline, and what is compared with it."""
    others = parse_arms(formats)
    base = parse_arm(config.baseline_kv_cache_dtype)
    # Another name than any arm's: the baseline may also be measured against itself.
    return replace(base, name=f"{base.name} (baseline)"), others


def _documents(
    data: str | Path | Sequence[Document] | None, sources: Sequence[str], config: EvaluationConfig
) -> tuple[list[Document], Sequence[str]]:
    if data is None:
        documents: list[Document] = ["\n\n".join(topics.values())]
        sources = (_OWN_TEXT,)
    elif isinstance(data, str | Path):
        documents, sources = read_documents([str(data)]), (Path(data).name,)
    else:
        documents = list(data)
    if config.chat:
        documents = [
            [{"role": "user", "content": document}] if isinstance(document, str) else document
            for document in documents
        ]
    return documents, sources


def _load(model: str | LoadedModel | ModelConfig) -> tuple[ModelConfig, LoadedModel]:
    if isinstance(model, LoadedModel):
        return ModelConfig(model=model.name), model
    config = ModelConfig(model=model) if isinstance(model, str) else model
    return config, load_model(config, resolve_device(DeviceConfig()))


def _fitted(config: EvaluationConfig, longest: int) -> EvaluationConfig:
    """With lengths that were not asked for cut to what the model knows."""
    lengths = tuple(length for length in config.retrieval_lengths if length)
    if config.retrieval_lengths == EvaluationConfig().retrieval_lengths:
        lengths = tuple(length for length in lengths if length + _ANSWER_ROOM <= longest)
    max_seq_len = config.max_seq_len or min(_MAX_SEQ_LEN, longest - 1)
    return replace(config, retrieval_lengths=lengths, max_seq_len=max_seq_len)


def _engine_config(
    config: EvaluationConfig,
    model_config: ModelConfig,
    model: LoadedModel,
    text: EvaluationText,
    *,
    has_tasks: bool,
) -> EngineConfig:
    """Of engines that hold the longest of what will be run.

    Raises:
        RequestError: if that is more than the model knows.
    """
    limit = model_config.max_model_len or model.max_position
    prompts = max((len(prompt.token_ids) for prompt in text.prompts), default=0)
    needed = max(
        (config.max_seq_len or 0) + 1,
        prompts + config.max_tokens,
        max(config.retrieval_lengths, default=0) + _ANSWER_ROOM,
    )
    if needed > limit:
        raise RequestError(
            f"The longest sequence to be measured has {needed:,} tokens, but {limit:,} is the most "
            "here: lower --max-seq-len, --max-tokens or --retrieval-lengths, give shorter prompts, "
            "or raise --max-model-len."
        )
    if has_tasks:
        needed = max(needed, min(_TASK_LEN, limit))
    engine = EngineConfig.from_options(
        {
            "max_num_seqs": _MAX_NUM_SEQS,
            "max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS,
            "seed": config.seed,
        }
    )
    return replace(engine, model=replace(model_config, max_model_len=needed))


def _pool_tokens(engine: EngineConfig) -> int:
    """Two of the longest sequences, and room for each sequence's own tokens behind a shared one."""
    return 2 * (engine.model.max_model_len or 0) + _MAX_NUM_SEQS * _ANSWER_ROOM


def _digest(
    config: EvaluationConfig,
    arms: Arms,
    text: EvaluationText,
    tasks: Sequence[Task],
    model: LoadedModel,
) -> str:
    """Of all that decides what is measured; thresholds only decide what is said of it."""
    thresholds = ("max_kld", "min_top1", "max_accuracy_drop")
    decides = {k: v for k, v in asdict(config).items() if k not in thresholds}
    content = {
        "version": version("tightkv"),
        "options": decides,
        "text": text.sha256,
        "tasks": [task.sha256 for task in tasks],
        "weights": model.identity.weights,
        "dtype": str(model.dtype),
        "arms": {arm.name: arm.engine.storage.fingerprint().hex() for arm in arms},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _shown_name(model: str) -> str:
    """A path without its folders, which are nobody else's business; a hub id as it is."""
    return Path(model).name if Path(model).exists() else model


def _noise_floor(run: _Run, window: Sequence[int]) -> DivergenceFigures:
    """The baseline against itself, read in other chunks."""
    scheduler = replace(run.engine.scheduler, max_num_batched_tokens=_OTHER_CUT)
    engine = replace(run.engine, scheduler=scheduler)
    base = parse_arm(run.config.baseline_kv_cache_dtype)
    other = make_arm(base, engine, run.model, _pool_tokens(engine), run.backend)
    return measure_noise_floor(run.arms.base, other, window[:_NOISE_TOKENS], run.journal)


def _sampled(config: EvaluationConfig) -> tuple[SamplingParams, ...]:
    if not config.temperature:
        return ()
    return (
        SamplingParams(
            temperature=config.temperature, seed=config.seed, max_tokens=config.max_tokens
        ),
    )


def _layer_groups(
    run: _Run, windows: Sequence[Sequence[int]]
) -> dict[str, list[LayerGroupFigures]]:
    """Each arm with its formats in one group of layers, and the model's data type elsewhere."""
    figures: dict[str, list[LayerGroupFigures]] = {spec.name: [] for spec in run.others}
    for layers, skipped in _groups(run):
        specs = [
            replace(spec, name=f"{spec.name} in layers {layers}", skip_layers=skipped)
            for spec in run.others
        ]
        arms = Arms(
            run.arms.base,
            tuple(
                make_arm(spec, run.engine, run.model, _pool_tokens(run.engine), run.backend)
                for spec in specs
            ),
        )
        found = measure_layer_groups(arms, windows, run.journal, run.progress)
        for whole, part in zip(run.others, specs, strict=True):
            figures[whole.name].append(LayerGroupFigures(layers=layers, figures=found[part.name]))
    return figures


def _groups(run: _Run) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Layers of each group, and those outside it."""
    layers = [layer.layer_idx for layer in prepare_model(run.model.model).layers]
    count = min(run.config.layer_groups, len(layers))
    for index in range(count):
        inside = layers[index * len(layers) // count : (index + 1) * len(layers) // count]
        yield layer_ranges(inside), tuple(str(layer) for layer in layers if layer not in inside)


def _retrieval(
    run: _Run, filler: Sequence[int]
) -> tuple[tuple[RetrievalCell, ...], dict[str, RetrievalFigures]]:
    config = run.config
    if not config.retrieval_lengths:
        return (), {}
    return measure_retrieval(
        run.arms,
        filler,
        config.retrieval_lengths,
        config.retrieval_depths,
        config.retrieval_trials,
        config.seed,
        run.journal,
        run.progress,
    )
