"""MODEL without its weights: config, and what the weight files say of their size."""

from __future__ import annotations

import copy
import json
import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from transformers import AutoConfig, PreTrainedConfig

from tightkv.errors import CheckpointError, ConfigError, TightKVError
from tightkv.models.compatibility import one_line
from tightkv.models.loader import run_loader

__all__ = ["ModelSource", "read_source"]

_logger = logging.getLogger("tightkv")

_INDEX = "model.safetensors.index.json"
_NEEDED = ("num_hidden_layers", "hidden_size")
_NEEDED_OF_TEXT_MODELS = (*_NEEDED, "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What is there of a model.

    Attributes:
        name: for people.
        config: of the whole model, as transformers reads it.
        text: of its text decoder, which is the same for a text model.
        folder: on this disk, or None.
        file_bytes: of the weights in their files, or None where there are none.
        is_gguf: whether they are GGUF, which TightKV expands to float32.
    """

    name: str
    config: PreTrainedConfig
    text: PreTrainedConfig
    folder: Path | None
    file_bytes: int | None
    is_gguf: bool = False


def read_source(model: str, revision: str | None = None) -> ModelSource:
    """Read the config of a folder, a `config.json`, a GGUF file or a hub id; never weights.

    Raises:
        CheckpointError: what is missing, broken, or cannot be had.
        ConfigError: if no model was given.
    """
    if not model:
        raise ConfigError(
            "No model was given: name a folder, a config.json, a GGUF file or a hub id."
        )
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        return _gguf(path)
    if path.is_dir() or path.suffix == ".json":
        return _folder(path)
    if path.exists():
        raise CheckpointError(
            f"{path} is neither a folder, nor a config.json, nor a GGUF file: give one of them."
        )
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise CheckpointError(
            f"There is no folder {model}, and it is no hub id (name or owner/name) either: "
            "check the path."
        ) from error
    return _hub(model, revision)


def _folder(path: Path) -> ModelSource:
    file = path / "config.json" if path.is_dir() else path
    folder = file.parent
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder} holds a LoRA adapter (adapter_config.json): plan its base model."
        )
    if not file.is_file():
        raise CheckpointError(f"There is no {file}: give a folder with a config.json.")
    config = _read_config(str(file), lambda: AutoConfig.from_pretrained(file))
    _check_keys(str(file), _read_json(file), config)
    return ModelSource(
        folder.name if path.is_dir() else file.stem if file.stem != "config" else folder.name,
        config,
        config.get_text_config(decoder=True),
        folder,
        _file_bytes(folder),
    )


def _gguf(path: Path) -> ModelSource:
    if not path.is_file():
        raise CheckpointError(f"There is no GGUF file {path}: check the path.")
    reader = _read(f"{path} cannot be read as a GGUF model", lambda: GGUFReader(path))
    config = _read_config(
        str(path), lambda: AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    )
    file_bytes = sum(int(tensor.n_bytes) for tensor in reader.tensors)
    text = config.get_text_config(decoder=True)
    return ModelSource(path.stem, config, text, None, file_bytes, is_gguf=True)


def _hub(model: str, revision: str | None) -> ModelSource:
    config = _read_config(model, lambda: AutoConfig.from_pretrained(model, revision=revision))
    try:
        settings, _ = type(config).get_config_dict(model, revision=revision)
        _check_keys(model, settings, config)
        index = Path(hf_hub_download(model, _INDEX, revision=revision))
        file_bytes = _indexed_bytes(index)
    except TightKVError:
        raise
    except Exception as error:  # a single file has no index; the network has a dozen errors
        _logger.debug("no index of weights: %s", one_line(error))
        file_bytes = None
    text = config.get_text_config(decoder=True)
    return ModelSource(model, config, text, None, file_bytes)


def _file_bytes(folder: Path) -> int | None:
    """Bytes of all tensors: from the index, or from the headers of the files."""
    if (folder / _INDEX).is_file():
        indexed = _indexed_bytes(folder / _INDEX)
        if indexed is not None:
            return indexed
    files = sorted(folder.glob("*.safetensors"))
    return sum(_tensor_bytes(file) for file in files) if files else None


def _indexed_bytes(index: Path) -> int | None:
    total = _read_json(index).get("metadata", {}).get("total_size")
    return int(total) if isinstance(total, int | float) and total > 0 else None


def _tensor_bytes(file: Path) -> int:
    """The file less its header: 8 bytes that say how long the JSON is, and the JSON."""
    try:
        with file.open("rb") as opened:
            (header,) = struct.unpack("<Q", opened.read(8))
    except (OSError, struct.error) as error:
        raise CheckpointError(
            f"{file} cannot be read as safetensors: download it again."
        ) from error
    return max(file.stat().st_size - 8 - int(header), 0)


def _check_keys(where: str, settings: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Refuse a config without what decides the sizes: transformers would take a default."""
    text = config.get_text_config(decoder=True)
    needed: tuple[str, ...] = _NEEDED_OF_TEXT_MODELS
    given = settings
    if text is not config:
        nested = next((n for n, v in vars(config).items() if v is text), "text_config")
        needed, given = _NEEDED, settings.get(nested) or settings
    for key in needed:
        names = {key, text.attribute_map.get(key, key)}
        names |= {name for name, target in text.attribute_map.items() if target == key}
        if not names & set(given):
            raise CheckpointError(
                f"{where} lacks {' or '.join(sorted(names))}, without which nothing can be "
                "planned: add it, or download the config again."
            )


def _read_config(where: str, load: Callable[[], object]) -> PreTrainedConfig:
    config: PreTrainedConfig = _read(f"The config of {where!r} cannot be read", load)
    return copy.deepcopy(config)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({one_line(error)}): download it again."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object: download it again.")
    return content


def _read(problem: str, load: Callable[[], object]) -> Any:
    own_code = CheckpointError(
        f"{problem}, because it comes with Python code of its own, which is not run here: plan a "
        "model that transformers knows."
    )
    return run_loader(load, problem, own_code)
