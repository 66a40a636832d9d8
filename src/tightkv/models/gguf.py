"""GGUF files: converted once into a cached Hugging Face folder, then loaded like any other.

transformers reads GGUF, but takes long, and drops without a word what it has no place for; the
second start must be fast, and nothing may be lost.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from tightkv.errors import CheckpointError, InsufficientMemoryError, UnsupportedModelError
from tightkv.files import cache_folder
from tightkv.models.checkpoint import sample_digest
from tightkv.models.compatibility import check_model, one_line, quiet_transformers

__all__ = ["convert_gguf"]

_logger = logging.getLogger("tightkv")

# Part of the key: raise it when a conversion would come out differently.
_FORMAT = 1
_FLOAT32_BYTES = 4
# Tokenizer, configs and file system overhead.
_SPARE_BYTES = 64 << 20
# Other tokens that end an answer; `eos` alone misses the end of a turn in some chat models.
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def convert_gguf(path: Path, cache_dir: Path | None = None) -> Path:
    """Convert a GGUF file into a Hugging Face folder with float32 weights, once.

    Args:
        path: the GGUF file.
        cache_dir: where converted models are kept; default `cache_folder("models")`.

    Returns:
        The folder, complete: it appears by one rename, so two processes may convert at once.

    Raises:
        CheckpointError: no such file, or one that is broken or not GGUF.
        UnsupportedModelError: a model that is not served, or would lose something.
        InsufficientMemoryError: the folder would not fit on the disk.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no GGUF file {path}: check the path.")
    models = cache_dir or cache_folder("models")
    target = models / f"{path.stem}-{_fingerprint(path)}"
    if target.is_dir():
        return target
    with _translated(path):
        reader = GGUFReader(path)
    _check_reader(path, reader)
    _check_disk(path, models, _needed_bytes(reader))
    _logger.info("converting %s once into %s (%d bytes)", path, target, _needed_bytes(reader))
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=models))
    try:
        _write_folder(path, reader, unfinished)
        _publish(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _fingerprint(path: Path) -> str:
    return sample_digest([path], f"{_FORMAT} {path.stat().st_size}")[:16]


def _needed_bytes(reader: GGUFReader) -> int:
    values = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return values * _FLOAT32_BYTES + _SPARE_BYTES


def _check_reader(path: Path, reader: GGUFReader) -> None:
    """Refuse rotary scaling: transformers drops it on the way, and long answers would be wrong."""
    architecture = _field(reader, "general.architecture")
    if not isinstance(architecture, str) or not reader.tensors:
        raise CheckpointError(f"{path} holds no model: give a GGUF file with weights.")
    scaling = _field(reader, f"{architecture}.rope.scaling.type")
    baked = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    # gpt-oss is the one architecture whose scaling transformers carries over.
    if architecture == "gpt-oss" or (scaling in (None, "none") and not baked):
        return
    raise UnsupportedModelError(
        f"{path} scales its rotary embedding ({', '.join(baked) or scaling}), which a conversion "
        "from GGUF would lose: use the model's Hugging Face folder."
    )


def _check_disk(path: Path, models: Path, needed: int) -> None:
    try:
        models.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(models).free
    except OSError as error:
        raise CheckpointError(
            f"The cache folder {models} cannot be used ({one_line(error)}): set TIGHTKV_CACHE_DIR."
        ) from error
    if needed > free:
        raise InsufficientMemoryError(
            f"Converting {path} needs {needed} bytes in {models}, where {free} are free: "
            "free some, or set TIGHTKV_CACHE_DIR to a larger disk."
        )


def _write_folder(path: Path, reader: GGUFReader, folder: Path) -> None:
    """Config, tokenizer, weights and generation config, all from one file."""
    with _translated(path):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    check_model(config)
    with _translated(path):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, config=config)
        tokenizer.save_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    model, info = loaded
    _check_complete(path, reader, model, info["missing_keys"])
    with _translated(path):
        _set_ends(reader, model)
        # The weights are float32 by now, but transformers refuses to save what came from GGUF.
        model.hf_quantizer = None
        model.save_pretrained(folder)
        _forget_origin(folder, config)


def _check_complete(
    path: Path, reader: GGUFReader, model: PreTrainedModel, missing: set[str]
) -> None:
    """The file's numbers and the model's must be as many; transformers skips unknown tensors."""
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    loaded = sum(
        {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}.values()
    )
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} weights of its model, as {min(missing)}: "
            "download it again, or use the model's Hugging Face folder."
        )
    if stored != loaded:
        raise UnsupportedModelError(
            f"{path} holds {stored} numbers where {type(model).__name__} has {loaded}, so that a "
            "conversion would lose something: use the model's Hugging Face folder."
        )


def _set_ends(reader: GGUFReader, model: PreTrainedModel) -> None:
    known = model.generation_config.eos_token_id
    ends = {known} if isinstance(known, int) else set(known or ())
    ends |= {end for key in _END_KEYS if isinstance(end := _field(reader, key), int)}
    if ends:
        model.generation_config.eos_token_id = min(ends) if len(ends) == 1 else sorted(ends)


def _forget_origin(folder: Path, config: PreTrainedConfig) -> None:
    """Take out what says that the weights are still GGUF."""
    file = folder / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    settings.setdefault("model_type", config.model_type)
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _publish(unfinished: Path, target: Path) -> None:
    unfinished.chmod(0o755)  # mkdtemp lets only its owner in
    try:
        unfinished.rename(target)
    except OSError:
        # Another process was faster with the same file. Anything else is a real error.
        if not target.is_dir():
            raise


def _field(reader: GGUFReader, key: str) -> object:
    field = reader.get_field(key)
    return None if field is None else field.contents()


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Foreign code at work on the file: no noise, and whatever it raises becomes one sentence."""
    try:
        # The converter's progress bar heeds no setting, only where stderr leads.
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:  # a broken file can raise anything in a parser
        raise CheckpointError(
            f"{path} cannot be read as a GGUF model ({one_line(error)}): download it again, "
            "or use the model's Hugging Face folder."
        ) from error
