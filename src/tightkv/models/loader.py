"""From MODEL (a Hugging Face folder, a hub id or a GGUF file) to a model that is ready to run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tightkv.config import ModelConfig
from tightkv.errors import CheckpointError, ConfigError, TightKVError, UnsupportedModelError
from tightkv.models.checkpoint import ModelIdentity, checkpoint_folder, identify
from tightkv.models.checkpoint_scales import (
    CheckpointScales,
    is_scale_name,
    only_the_cache_is_quantized,
    read_scales,
)
from tightkv.models.compatibility import (
    check_checkpoint_folder,
    check_model,
    check_model_class,
    one_line,
    quiet_transformers,
)
from tightkv.models.gguf import convert_gguf
from tightkv.models.linear import pack_linear_layers, weight_bytes
from tightkv.planning import check_max_model_len

__all__ = ["Checkpoint", "LoadedModel", "load_model", "load_tokenizer", "run_loader"]

_logger = logging.getLogger("tightkv")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, with all that the engine asks about it.

    Attributes:
        model: the transformers model; on a CPU its linear layers are packed.
        tokenizer: with the chat template that was asked for, if one was.
        name: MODEL as the user gave it.
        dtype: of weights and activations.
        eos_token_ids: every token that ends an answer, by config and generation config.
        max_position: longest sequence that the model knows.
        vocab_size: width of the logits.
        identity: what tells it from others of its shape.
        kv_scales: scales of the KV cache that came with the checkpoint, if some did.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    max_position: int
    vocab_size: int
    identity: ModelIdentity
    kv_scales: CheckpointScales | None

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take, as they are held now."""
        return weight_bytes(self.model)


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a model before its weights are loaded."""

    config: PreTrainedConfig
    identity: ModelIdentity
    kv_scales: CheckpointScales | None


def load_model(
    config: ModelConfig,
    device: torch.device,
    before_weights: Callable[[Checkpoint], None] | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer; what cannot be served is refused before weights load.

    Args:
        config: which model, and how.
        device: where it is to run.
        before_weights: called with what is known before the weights load; it may raise.

    Raises:
        ConfigError: a setting that is wrong; as UnsupportedModelError, a model that is not served.
        CheckpointError: files that are missing, broken or of an unknown kind.
    """
    dtype = _dtype(config.dtype, device)
    source = _locate(config)
    settings = _load_config(config, source)
    check_model(settings)
    max_position = _positive(settings, "max_position_embeddings")
    check_max_model_len(config.max_model_len, max_position)
    vocab_size = _positive(settings, "vocab_size")
    tokenizer = _load_tokenizer(config, source)
    checkpoint = _look_into(config, source, settings)
    if before_weights is not None:
        before_weights(checkpoint)
    model = _load_weights(config, source, settings, dtype)
    check_model_class(type(model), settings.model_type)
    model = model.train(False).requires_grad_(False).to(device)
    if device.type == "cpu":
        pack_linear_layers(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=config.model,
        dtype=model.dtype,
        eos_token_ids=_eos_token_ids(model),
        max_position=max_position,
        vocab_size=vocab_size,
        identity=checkpoint.identity,
        kv_scales=checkpoint.kv_scales,
    )


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer alone; errors as in `load_model`."""
    return _load_tokenizer(config, _locate(config))


def _locate(config: ModelConfig) -> str:
    """The folder of the model, or its hub id."""
    try:
        return _locate_on_disk(config, Path(config.model).expanduser())
    except OSError as error:
        raise CheckpointError(
            f"The model {one_line(OSError(config.model), 80)} cannot be read ({error.strerror}): "
            "check the path and its permissions."
        ) from error


def _locate_on_disk(config: ModelConfig, path: Path) -> str:
    if not config.model:
        raise ConfigError(
            "No model was given: name a Hugging Face folder, a hub id or a GGUF file."
        )
    if path.exists() and config.revision is not None:
        raise ConfigError(
            f"A revision ({config.revision!r}) belongs to a hub id, but {path} is on this disk: "
            "leave the revision out."
        )
    if path.suffix.lower() == ".gguf":
        return str(convert_gguf(path))
    if path.is_file():
        raise CheckpointError(f"{path} is a file and not GGUF: give the folder of the model.")
    if path.is_dir():
        check_checkpoint_folder(path)
        _check_weight_files(path)
        return str(path)
    if not _HUB_ID.fullmatch(config.model):
        raise CheckpointError(
            f"There is no folder {config.model}, and it is no hub id (name or owner/name) either: "
            "check the path."
        )
    return config.model


def _check_weight_files(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickles:
        raise CheckpointError(
            f"{folder} holds pickled weights ({pickles[0]}), which can run code when read: "
            "convert them to safetensors."
        )
    raise CheckpointError(f"{folder} holds no weights (*.safetensors): download the model again.")


def _load_config(config: ModelConfig, source: str) -> PreTrainedConfig:
    def load() -> object:
        return AutoConfig.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code
        )

    settings: PreTrainedConfig = _read(load, f"The config of model {source!r} cannot be read")
    return settings


def _look_into(config: ModelConfig, source: str, settings: PreTrainedConfig) -> Checkpoint:
    folder: Path = _read(
        lambda: checkpoint_folder(source, config.revision), f"The files of {source!r} cannot be had"
    )
    quantization = getattr(settings, "quantization_config", None)  # not every config has the field
    scales: CheckpointScales | None = _read(
        lambda: read_scales(folder, quantization), _unreadable_weights(source)
    )
    if only_the_cache_is_quantized(quantization):
        del settings.quantization_config  # transformers would look for quantized weights
    return Checkpoint(settings, identify(settings, folder), scales)


def _load_tokenizer(config: ModelConfig, source: str) -> PreTrainedTokenizerBase:
    where = config.tokenizer or source

    def load() -> object:
        return AutoTokenizer.from_pretrained(
            where,
            revision=None if config.tokenizer else config.revision,
            trust_remote_code=config.trust_remote_code,
        )

    tokenizer: PreTrainedTokenizerBase = _read(load, f"The tokenizer of {where!r} cannot be read")
    # Without its files, transformers builds an empty tokenizer rather than fail.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise CheckpointError(
            f"{where!r} has no tokenizer files: add them (tokenizer.json), or name another "
            "tokenizer with --tokenizer."
        )
    if config.chat_template is not None:
        _set_chat_template(tokenizer, Path(config.chat_template).expanduser())
    return tokenizer


def _set_chat_template(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    try:
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The chat template {str(file)!r} cannot be read ({one_line(error)}): "
            "give a file with a Jinja template."
        ) from error
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template {str(file)!r} is not valid Jinja (line {error.lineno}: "
            f"{one_line(error)}): correct it."
        ) from error
    except Exception:
        # A template may refuse this one message on purpose; that it parses is all we ask.
        return


def _load_weights(
    config: ModelConfig, source: str, settings: PreTrainedConfig, dtype: torch.dtype | str
) -> PreTrainedModel:
    def load() -> object:
        return AutoModelForCausalLM.from_pretrained(
            source,
            config=settings,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            # They are refused below, by name; the error of transformers names none.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )

    _logger.info("loading the weights of %s", source)
    model, info = _read(load, _unreadable_weights(source))
    _check_keys(source, "missing", info["missing_keys"])
    _check_keys(source, "of another shape", (key[0] for key in info["mismatched_keys"]))
    surplus = [key for key in info["unexpected_keys"] if not is_scale_name(key)]
    _check_keys(source, "without a place", surplus)
    loaded: PreTrainedModel = model
    return loaded


def _unreadable_weights(source: str) -> str:
    return f"The weights of model {source!r} cannot be read"


def _check_keys(source: str, problem: str, keys: Iterable[str]) -> None:
    names = sorted(keys)
    if names:
        raise CheckpointError(
            f"The weights of model {source!r} do not fit its config.json ({len(names)} {problem}, "
            f"as {names[0]}): download both again."
        )


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in _DTYPES:
        raise ConfigError(f"Unknown dtype {name!r}: allowed are auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    ids: set[int] = set()
    for settings in (model.config, model.generation_config):
        # A config may lack the field, hold one id, or a list of them.
        known = getattr(settings, "eos_token_id", None)
        ids |= {known} if isinstance(known, int) else set(known or ())
    # Some configs name a token that the model cannot make.
    return frozenset(token for token in ids if 0 <= token < model.config.vocab_size)


def _positive(settings: PreTrainedConfig, name: str) -> int:
    # Not every config has the field.
    value = getattr(settings, name, None)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(
            f"Models of type {settings.model_type!r} are not served, because their config does not "
            f"tell {name} (it is {value!r}): add it to config.json."
        )
    return value


def _read(load: Callable[[], object], problem: str) -> Any:
    advice = "read that code, and set --trust-remote-code if you trust it."
    own_code = f"{problem}, because it comes with Python code of its own: {advice}"
    return run_loader(load, problem, ConfigError(own_code))


def run_loader(load: Callable[[], object], problem: str, own_code: TightKVError) -> Any:
    """Run a loader of transformers; whatever it raises becomes one sentence.

    Args:
        load: the loader.
        problem: how the sentence begins.
        own_code: raised where the model comes with Python code of its own.
    """
    try:
        with quiet_transformers():
            return load()
    except TightKVError:
        raise
    except Exception as error:  # broken files raise a dozen unrelated types
        if "trust_remote_code=True" in str(error):
            raise own_code from error
        raise CheckpointError(
            f"{problem} ({one_line(error)}): check the name and the files."
        ) from error
