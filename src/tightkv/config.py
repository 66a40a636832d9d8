"""What a user asks for: frozen dataclasses, composed into `EngineConfig`.

Each field carries its help text, from which the command line is made. Nothing here imports torch.
"auto" and None are replaced by `tightkv.engine.resolve`, which returns a new config.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tightkv.errors import ConfigError

__all__ = [
    "PARTS",
    "REFUSED_OPTIONS",
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "ModelConfig",
    "SchedulerConfig",
]


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how its weights are held."""

    model: str = _option(
        "", "Hugging Face folder or hub id (safetensors), or a GGUF file", positional=True
    )
    tokenizer: str | None = _option(None, "folder or hub id of the tokenizer, if not the model's")
    revision: str | None = _option(None, "branch, tag or commit of a hub id")
    chat_template: str | None = _option(None, "file with a Jinja chat template")
    trust_remote_code: bool = _option(False, "run Python code that comes with the model")
    dtype: str = _option(
        "auto",
        "data type of weights and activations; auto is float32 on a CPU",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    max_model_len: int | None = _option(
        None, "longest sequence, prompt and answer together; default: what the model and pool allow"
    )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How K and V are stored, and how much memory they may take."""

    kv_cache_dtype: str = _option("auto", "format of K and V; auto is the model's data type")
    k_cache_dtype: str | None = _option(None, "format of K alone; default: --kv-cache-dtype")
    v_cache_dtype: str | None = _option(None, "format of V alone; default: --kv-cache-dtype")
    kv_cache_dtype_skip_layers: tuple[str, ...] = _option(
        (),
        "layers kept in the model's data type: indices, negative from the end, ranges as 0-7, "
        "or sliding_window",
        item=str,
    )
    quantization_config_path: str | None = _option(
        None,
        "scales file of `tightkv calibrate`, which decides format and scales of each layer; auto "
        "makes one at the first start from text of the model's own",
    )
    block_size: int = _option(16, "tokens per block, a multiple of 16")
    kv_cache_memory_bytes: int | None = _option(
        None, "bytes of the KV cache pool, as 512M or 2GiB; overrides the utilization", bytes=True
    )
    gpu_memory_utilization: float = _option(
        0.9, "share of the device's memory (on a CPU: of the free memory) for weights and KV cache"
    )
    enable_prefix_caching: bool = _option(True, "reuse the blocks of equal prompt beginnings")
    kv_cache_scales: Any = field(default=None, metadata={"python_only": True})


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How much work one step of the engine may hold."""

    max_num_seqs: int = _option(64, "most sequences in one step")
    max_num_batched_tokens: int = _option(1024, "most tokens in one step")
    enable_chunked_prefill: bool = _option(
        True, "cut long prompts into chunks that share a step with decodes"
    )
    seed: int = _option(0, "seed of requests that bring none")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where the engine runs."""

    device: str = _option("auto", "device to run on", choices=("auto", "cpu"))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All that an engine needs to start."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Sort flat options (`kv_cache_dtype="int8"`) into their parts.

        Raises:
            ConfigError: for a name that no part has; the nearest known name is in the message.
        """
        owner = {option.name: part for part in PARTS for option in fields(PARTS[part])}
        for name in options:
            if name in REFUSED_OPTIONS:
                raise ConfigError(f"{name} is refused: {REFUSED_OPTIONS[name]}")
            if name not in owner:
                raise ConfigError(_unknown_option(name, owner))
        return cls(
            **{
                part: kind(**{name: options[name] for name in options if owner[name] == part})
                for part, kind in PARTS.items()
            }
        )


PARTS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
}


REFUSED_OPTIONS: dict[str, str] = {
    "enable_lora": "LoRA adapters are not served; merge the adapter into the model's weights.",
    "lora_modules": "LoRA adapters are not served; merge the adapter into the model's weights.",
    "speculative_config": "speculative decoding is not served; leave it out.",
    "speculative_model": "speculative decoding is not served; leave it out.",
    "limit_mm_per_prompt": "images, audio and video are not served; send text.",
    "quantization": "weights are served as the checkpoint holds them; leave it out.",
    "load_format": "weights are read from safetensors or GGUF; leave it out.",
    "tensor_parallel_size": "one process serves on one device; leave it out.",
    "pipeline_parallel_size": "one process serves on one device; leave it out.",
    "swap_space": "preempted sequences are computed anew, not moved; leave it out.",
}
"""Options that other engines have and this one does not, each with what to do instead."""


def _unknown_option(name: str, known: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}."
    return f"Unknown option {name!r}: {hint}"
