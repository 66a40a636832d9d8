"""What a checkpoint's files tell before its weights are loaded: which model it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig

__all__ = ["ModelIdentity", "checkpoint_folder", "identify", "sample_digest"]

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What tells a model from others of the same shape.

    Attributes:
        architecture: name of the model class.
        model_type: of its config.
        weights: SHA-256 of sizes and evenly spread pieces of the weight files, as stored.
    """

    architecture: str
    model_type: str
    weights: str


def identify(config: PreTrainedConfig, folder: Path) -> ModelIdentity:
    """The identity of the checkpoint in a folder."""
    files = sorted(folder.glob("*.safetensors"))
    sizes = " ".join(str(file.stat().st_size) for file in files)
    architectures = config.architectures or [config.model_type]
    return ModelIdentity(architectures[0], config.model_type, sample_digest(files, sizes))


def checkpoint_folder(source: str, revision: str | None) -> Path:
    """The folder itself, or where the hub's files of an id lie; they are downloaded if need be."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    patterns = ["*.safetensors", "*.json"]
    return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))


def sample_digest(files: Iterable[Path], salt: str) -> str:
    """SHA-256 over pieces of the files: cheap, and true for files met in practice."""
    digest = hashlib.sha256(salt.encode())
    for path in files:
        last = max(path.stat().st_size - _SAMPLE_BYTES, 0)
        with path.open("rb") as file:
            for offset in sorted({last * index // (_SAMPLES - 1) for index in range(_SAMPLES)}):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
