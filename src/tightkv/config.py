"""What a user asks for: frozen dataclasses, composed into `EngineConfig`.

Each field carries its help text, from which the command line is made. Nothing here imports torch.
"auto" and None are replaced by `tightkv.engine.resolve`, which returns a new config.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tightkv.errors import ConfigError

__all__ = [
    "PARTS",
    "PREEMPTION_MODES",
    "REFUSED_OPTIONS",
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "EvaluationConfig",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "unknown_option",
]


PREEMPTION_MODES = ("auto", "swap", "recompute")


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
        metavar="LAYER",
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
    debug_integrity: bool = _option(
        False,
        "check all that is noted about blocks after every step, and overwrite freed blocks; for "
        "the search of faults",
    )
    swap_space: float = _option(
        0.0,
        "GiB for blocks of preempted sequences and of evicted prefixes, on a CPU in a file; 0: "
        "they are computed anew",
    )
    swap_dir: str | None = _option(
        None, "folder of the swap space's file; default: the system's for temporary files"
    )
    kv_cache_scales: Any = field(default=None, metadata={"python_only": True})


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How much work one step of the engine may hold."""

    max_num_seqs: int = _option(64, "most sequences in one step")
    max_num_batched_tokens: int = _option(1024, "most tokens in one step")
    enable_chunked_prefill: bool = _option(
        True, "cut long prompts into chunks that share a step with decodes"
    )
    preemption_mode: str = _option(
        "auto",
        "what becomes of preempted sequences: swap moves their blocks to the swap space, recompute "
        "computes them anew, auto does what costs less; without a swap space, recompute",
        choices=PREEMPTION_MODES,
    )
    scheduling_policy: str = _option(
        "fcfs",
        "which waiting request starts first: fcfs the one that came first, priority the one with "
        "the lowest priority",
        choices=("fcfs", "priority"),
    )
    seed: int = _option(0, "seed of requests that bring none")


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where the engine runs."""

    device: str = _option(
        "auto", "device to run on; auto is the CPU", choices=("auto", "cpu", "cuda")
    )
    allow_untested_device: bool = _option(
        False, "go on with a device on which TightKV was never run"
    )
    enforce_eager: bool = _option(
        False,
        "launch each kernel of a decode instead of replaying captured steps; on a CPU, where "
        "nothing is captured, it changes nothing",
    )
    tensor_parallel_size: int = _option(1, "devices that share the model; only 1 is served")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the HTTP server listens, whom it serves, and where it stops."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = _option(8000, "port to listen on; 0 takes a free one")
    api_key: tuple[str, ...] = _option(
        (),
        "keys, one of which requests must bring (Authorization: Bearer KEY); also taken from "
        "TIGHTKV_API_KEY",
        item=str,
        metavar="KEY",
    )
    served_model_name: tuple[str, ...] = _option(
        (), "names of the model in requests, the first in answers; default: MODEL", item=str
    )
    generation_config: str = _option(
        "auto",
        "sampling parameters that requests leave open: auto takes those of the model's "
        "generation_config.json, vllm takes OpenAI's",
        choices=("auto", "vllm"),
    )
    max_queue_len: int = _option(
        1024,
        "most completions that wait, besides the --max-num-seqs that can run; further requests are "
        "answered 503 with Retry-After",
    )
    max_request_bytes: int = _option(8 * 2**20, "longest request body", bytes=True)
    max_logprobs: int = _option(20, "most log-probabilities per token that a request may ask for")
    shutdown_timeout: float = _option(
        30.0, "seconds that running requests have to finish after SIGTERM"
    )
    kv_quality_sample_rate: float = _option(
        0.0,
        "share of finished requests that are scored again when the engine is idle, with the KV "
        "cache as served and in full precision",
    )
    enable_log_requests: bool = _option(False, "also log the text of prompts")
    allowed_origins: tuple[str, ...] = _option(
        (), "origins that browsers may call from (CORS)", item=str, metavar="ORIGIN"
    )
    ssl_certfile: str | None = _option(None, "certificate, for HTTPS")
    ssl_keyfile: str | None = _option(None, "key of the certificate")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is measured of a cache precision, how much of it, and what may be lost."""

    baseline_kv_cache_dtype: str = _option(
        "auto", "what the others are compared with, spelled as in --kv-cache-dtype"
    )
    num_samples: int = _option(2, "windows of text that are forced through each cache")
    max_seq_len: int | None = _option(
        None, "tokens of a window; default: 2048, or as many as the model knows"
    )
    num_prompts: int = _option(32, "prompts that are answered; 0 leaves answers out")
    prompt_len: int = _option(128, "tokens of a plain text that are taken as a prompt")
    max_tokens: int = _option(128, "tokens of an answer at most")
    temperature: float = _option(
        0.0, "above 0: answers are also sampled, with the same seeds in each arm"
    )
    chat: bool = _option(False, "send plain texts as a user's message to a chat model")
    layer_groups: int = _option(
        0, "so many groups of layers are also measured alone, the others as the baseline has them"
    )
    tasks: tuple[str, ...] = _option(
        (),
        "gsm8k=FILE, humaneval=FILE, multiple_choice=FILE, or lm_eval:NAME for a task of "
        "lm-evaluation-harness",
        item=str,
        metavar="TASK",
    )
    task_limit: int | None = _option(None, "items of a task; default: all")
    allow_code_execution: bool = _option(
        False, "run programs that the model writes (humaneval), in a limited process"
    )
    retrieval_lengths: tuple[int, ...] = _option(
        (512, 1024, 2048),
        "tokens of the texts in which a sentence is hidden; 0 leaves retrieval out",
        item=int,
        metavar="N",
    )
    retrieval_depths: tuple[float, ...] = _option(
        (0.0, 0.25, 0.5, 0.75, 1.0), "where it is hidden, 0 to 1", item=float, metavar="X"
    )
    retrieval_trials: int = _option(1, "sentences per length and depth")
    max_kld: float = _option(0.02, "unsafe beyond this mean KL divergence, in nats")
    min_top1: float = _option(0.90, "unsafe below this share of tokens with the same top token")
    max_accuracy_drop: float = _option(0.02, "unsafe beyond this drop of a task's score")
    seed: int = _option(0, "of the choice of text, of sampling and of tasks")


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
                raise ConfigError(unknown_option(name, owner))
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
    "pipeline_parallel_size": "one process serves on one device; leave it out.",
    "data_parallel_size": "one process serves on one device; start several behind a proxy.",
    "cpu_offload_gb": "weights stay on the device; leave it out.",
    "calculate_kv_scales": "scales come from `tightkv calibrate` or from a probe; leave it out.",
    "quantization_param_path": "give the file to --quantization-config-path.",
    "guided_decoding_backend": "llguidance alone makes structured outputs; leave it out.",
    "tokenizer_mode": "the tokenizer is transformers' own; leave it out.",
    "enable_expert_parallel": "one process serves on one device; leave it out.",
    "kv_transfer_config": "the KV cache stays in this process; leave it out.",
    "compilation_config": "nothing is compiled at start; leave it out.",
    "disable_log_requests": "prompts are logged only with --enable-log-requests; leave it out.",
    "disable_log_stats": "metrics are at /metrics, not in the log; leave it out.",
    "max_seq_len_to_capture": "decodes of any length are captured; leave it out.",
    "num_scheduler_steps": "each step is scheduled; leave it out.",
    "use_v2_block_manager": "there is one block manager; leave it out.",
    "tool_call_parser": "the form of tool calls is read from the chat template; leave it out.",
    "enable_auto_tool_choice": "tool_choice auto is always served; leave it out.",
    "reasoning_parser": "answers are not split into reasoning and rest; leave it out.",
    "response_role": "answers have the role assistant; leave it out.",
    "root_path": "paths are served as they are: let the proxy strip its prefix.",
    "hf_token": "log in with the `hf` command; leave it out.",
    "uvicorn_log_level": "the log is TightKV's; --quiet shows warnings only.",
}
"""Options that other engines have and this one does not, each with what to do instead."""


def unknown_option(name: str, known: Collection[str]) -> str:
    """A sentence about an option that there is not, with the nearest that there is."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}."
    return f"Unknown option {name!r}: {hint}"
