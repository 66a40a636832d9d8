"""Tiny random models and a byte tokenizer, for tests that need a model but no meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tightkv.models.compatibility import quiet_transformers

BOS, EOS, VOCAB_SIZE = 256, 257, 260

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

# A range of 0.2 makes logits differ clearly, so that greedy tokens do not hang on rounding.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 8},
    # Gemma ties its embeddings, and tied random weights of this range only repeat the last token.
    "gemma2": {
        **_GROUPED,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": False,
    },
    "gemma3_text": {
        **_GROUPED,
        "sliding_window": 8,
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING,
        "tie_word_embeddings": False,
    },
    "phi3": {"num_key_value_heads": 2, "original_max_position_embeddings": 512},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {"num_key_value_heads": 2},
    "gpt_oss": {
        **_GROUPED,
        "sliding_window": 8,
        "layer_types": _ALTERNATING[:2],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt2": {},
    "granite": {"num_key_value_heads": 2, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    "starcoder2": {"num_key_value_heads": 2, "sliding_window": None},
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, ids 0 to 255 in the order of the byte-level alphabet; then bos, eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    vocab |= {"<bos>": BOS, "<eos>": EOS}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    untyped: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = untyped(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def tiny_model(model_type: str = "llama", **overrides: Any) -> PreTrainedModel:
    """The same random float32 model at every call; see `SPECIFIC` for the types."""
    settings = {**_COMMON, **SPECIFIC.get(model_type, {}), **overrides}
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        untyped: Any = AutoModelForCausalLM
        model: PreTrainedModel = untyped.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        _randomize_vectors(model)
    model.train(False).requires_grad_(False)
    return model


def save_tiny_model(folder: Path, model_type: str = "llama", **overrides: Any) -> Path:
    """Save `tiny_model` and `tiny_tokenizer` as a Hugging Face folder; returns the folder."""
    with quiet_transformers():
        tiny_model(model_type, **overrides).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


def _randomize_vectors(model: PreTrainedModel) -> None:
    """Biases, norms and sinks start as 0 or 1, where a mistake with them would not be seen."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
