"""What of transformers is served rightly here; everything else is refused before weights load."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as untyped_logging

from tightkv.errors import CheckpointError, UnsupportedModelError
from tightkv.models.checkpoint_scales import only_the_cache_is_quantized

__all__ = [
    "check_architecture",
    "check_checkpoint_folder",
    "check_model",
    "check_model_class",
    "one_line",
    "quiet_transformers",
]

_logger = logging.getLogger("tightkv")
transformers_logging: Any = untyped_logging

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Sub-configs that are groups of settings, not models of their own (dbrx).
_SETTING_GROUPS = frozenset({"attn_config", "ffn_config"})
_MODALITIES = ("vision_config", "audio_config", "speech_config", "image_config", "vq_config")
# What no class attribute or config field of transformers tells.
_REFUSED_TYPES = {
    "bert-generation": "it is an encoder",
    "blt": "it reads bytes through an encoder of its own",
    "diffllama": "it calls attention twice in each layer",
    "doge": "it adds a mask of its own, made from each key's content, to the attention scores",
    "dory": "it runs some layers several times per token",
    "hrm_text": "it runs each layer several times per token",
}


def check_model(config: PreTrainedConfig) -> None:
    """Refuse a model that this engine would serve wrongly.

    Args:
        config: the model's config as transformers reads it; no weights are needed.

    Raises:
        UnsupportedModelError: with the reason, in one sentence.
    """
    _check_kind(config)
    _check_layer_types(config)
    _check_rope(config)
    _check_quantization(config)
    _check_causal_class(config)


def check_architecture(config: PreTrainedConfig) -> None:
    """Refuse a model whose layers keep something else than K and V of each token.

    What only touches numbers is not looked at (rotary scaling, quantized weights): other engines
    serve it, and the cache's bytes are the same.

    Raises:
        UnsupportedModelError: with the reason, in one sentence.
    """
    _check_kind(config)
    _check_layer_types(config)
    _check_causal_class(config)


def check_model_class(kind: type[PreTrainedModel], model_type: str) -> None:
    """Refuse a class that keeps recurrent state, or whose attention cannot be replaced.

    Raises:
        UnsupportedModelError: with the reason, in one sentence.
    """
    if kind._is_stateful:
        raise _refusal(model_type, "it is recurrent, and its state cannot live in a KV cache")
    if not kind._can_set_attn_implementation():
        raise _refusal(
            model_type, f"{kind.__name__} does not let its attention implementation be replaced"
        )


def check_checkpoint_folder(path: Path) -> None:
    """Refuse a folder that no model can be loaded from, without reading weights.

    Raises:
        UnsupportedModelError: a LoRA adapter, or a weight format that cannot be loaded here.
        CheckpointError: `config.json` is missing, or one of the JSON files is not JSON.
    """
    if (path / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"{path} holds a LoRA adapter (adapter_config.json), and adapters are not served: "
            "merge it into its base model first."
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(_missing_config(path))
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        if (path / name).is_file():
            _read_json(path / name)
    settings = _read_json(path / "config.json")
    _check_weight_format(str(settings.get("model_type")), settings.get("quantization_config"))


def one_line(error: BaseException, limit: int = 240) -> str:
    """The first sentence of a foreign error, on one line and without its final dot."""
    text = " ".join(str(error).split())
    if not text or isinstance(error, KeyError):  # a KeyError's text is the key alone
        text = f"{type(error).__name__} {text}".strip()
    sentence = text.split(". ")[0].rstrip(".")
    return sentence if len(sentence) <= limit else sentence[: limit - 3] + "..."


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars and warnings of transformers off the terminal; warnings go to the log."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)  # its errors are raised as well
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
    for warning in caught:
        _logger.debug("transformers warned: %s", warning.message)


def _check_kind(config: PreTrainedConfig) -> None:
    kind = config.model_type
    if config.is_encoder_decoder:
        raise _refusal(kind, "it is an encoder-decoder")
    others = {name for name in _MODALITIES if name in vars(config)}
    others |= set(config.sub_configs) - _SETTING_GROUPS
    if others:
        names = ", ".join(sorted(others))
        raise _refusal(kind, f"it is made of several models ({names}), not of a text decoder alone")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        raise _refusal(kind, "it is an encoder")
    if kind in _REFUSED_TYPES:
        raise _refusal(kind, _REFUSED_TYPES[kind])


def _check_layer_types(config: PreTrainedConfig) -> None:
    # Not every config has the field; those without have full attention, or say a window elsewhere.
    types = set(getattr(config, "layer_types", None) or ())
    wrong = sorted(types - _LAYER_TYPES)
    if wrong:
        raise _refusal(config.model_type, f"it has layers of type {', '.join(wrong)}")


def _check_rope(config: PreTrainedConfig) -> None:
    for rope in _rope_parameters(config):
        rope_type = rope.get("rope_type") or rope.get("type")
        if rope_type == "dynamic" or (rope_type == "longrope" and _exceeds_original(config, rope)):
            raise _refusal(
                config.model_type,
                f"its rotary embedding of type {rope_type!r} changes with the longest sequence of "
                "a batch, so that requests would change each other's answers",
            )


def _rope_parameters(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """The rotary settings: one set for all layers, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _exceeds_original(config: PreTrainedConfig, rope: Mapping[str, Any]) -> bool:
    original = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return original is None or bool(config.max_position_embeddings > original)


def _check_quantization(config: PreTrainedConfig) -> None:
    _check_weight_format(config.model_type, getattr(config, "quantization_config", None))


def _check_weight_format(model_type: str, settings: object) -> None:
    if settings is None or only_the_cache_is_quantized(settings):
        return
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    try:
        with quiet_transformers():
            loader: Any = AutoHfQuantizer
            quantizer = loader.from_config(settings, pre_quantized=True)
            quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:  # each of the twenty quantizers raises what it likes
        raise UnsupportedModelError(
            f"The weights of this {model_type!r} model are quantized with {method!r}, which cannot "
            f"be loaded here ({one_line(error)}): use an unquantized checkpoint or a GGUF file."
        ) from error


def _check_causal_class(config: PreTrainedConfig) -> None:
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        with quiet_transformers():
            kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        for one in kind if isinstance(kind, tuple) else (kind,):
            check_model_class(one, config.model_type)
    elif "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}):
        # A class that comes with the model is checked by the loader, once its code has run.
        raise _refusal(config.model_type, "transformers has no causal language model of this type")


def _refusal(model_type: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Models of type {model_type!r} are not served, because {reason}: use a decoder-only text "
        "model with full or sliding-window attention."
    )


def _missing_config(path: Path) -> str:
    files = sorted(file.name for file in path.glob("*.gguf"))
    if files:
        return f"{path} has no config.json, but GGUF files: give the path of one, as {files[0]}."
    return f"{path} has no config.json: give the folder of a Hugging Face model, or a GGUF file."


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({one_line(error)}): download the model again."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(content).__name__} instead of an object: "
            "download the model again."
        )
    return content
