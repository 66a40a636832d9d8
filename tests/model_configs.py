"""Public models as facts: what their `config.json` on the Hugging Face hub says of shapes.

Only what decides the KV cache and the size of the weights; each with its repository.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CONFIGS", "PublicModel"]


@dataclass(frozen=True)
class PublicModel:
    """A model's config, and the bytes per token of its KV cache in 16 bits, by hand."""

    repository: str
    config: dict[str, Any]
    kv_bytes: int
    billions: float  # parameters, as its model card has them
    text: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """What `config.json` holds."""
        return {**self.config, "text_config": self.text} if self.text else self.config


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }


CONFIGS: dict[str, PublicModel] = {
    # 2 (K and V) x 32 layers x 8 KV heads x 128 x 2 bytes = 131,072
    "Llama-3-8B": PublicModel(
        "meta-llama/Meta-Llama-3-8B",
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            **_llama(4096, 14336, 32, 32, 8),
        },
        131_072,
        8.03,
    ),
    # 2 x 80 x 8 x 128 x 2 = 327,680; times 8,192 tokens = 2.5 GiB
    "Llama-3-70B": PublicModel(
        "meta-llama/Meta-Llama-3-70B",
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            **_llama(8192, 28672, 80, 64, 8),
        },
        327_680,
        70.6,
    ),
    # 2 x 28 x 4 x 128 x 2 = 57,344
    "Qwen2.5-7B": PublicModel(
        "Qwen/Qwen2.5-7B-Instruct",
        {
            "model_type": "qwen2",
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
            "sliding_window": 131072,
            "use_sliding_window": False,
            **_llama(3584, 18944, 28, 28, 4),
        },
        57_344,
        7.62,
    ),
    # 2 x 80 x 8 x 128 x 2 = 327,680
    "Qwen2.5-72B": PublicModel(
        "Qwen/Qwen2.5-72B-Instruct",
        {
            "model_type": "qwen2",
            "vocab_size": 152064,
            "max_position_embeddings": 32768,
            "sliding_window": 131072,
            "use_sliding_window": False,
            **_llama(8192, 29568, 80, 64, 8),
        },
        327_680,
        72.7,
    ),
    # head_dim 128 is not 2048 / 32: 2 x 48 x 4 x 128 x 2 = 98,304
    "Qwen3-30B-A3B": PublicModel(
        "Qwen/Qwen3-30B-A3B",
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            **_llama(2048, 6144, 48, 32, 4),
        },
        98_304,
        30.5,
    ),
    # 2 x 32 x 8 x 128 x 2 = 131,072, all layers with a window of 4,096 tokens
    "Mistral-7B": PublicModel(
        "mistralai/Mistral-7B-v0.1",
        {
            "model_type": "mistral",
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            **_llama(4096, 14336, 32, 32, 8),
        },
        131_072,
        7.24,
    ),
    # head_dim 256: 2 x 42 x 8 x 256 x 2 = 344,064, half of the layers with a window
    "Gemma-2-9B": PublicModel(
        "google/gemma-2-9b",
        {
            "model_type": "gemma2",
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "head_dim": 256,
            "sliding_window": 4096,
            **_llama(3584, 14336, 42, 16, 8),
            "tie_word_embeddings": True,
        },
        344_064,
        9.24,
    ),
    # The text part: 2 x 62 x 16 x 128 x 2 = 507,904, 52 of 62 layers with a window of 1,024
    "Gemma-3-27B": PublicModel(
        "google/gemma-3-27b-it",
        {"model_type": "gemma3", "torch_dtype": "bfloat16"},
        507_904,
        27.0,
        text={
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
        },
    ),
    # No GQA: 2 x 32 x 32 x 96 x 2 = 393,216
    "Phi-3-mini": PublicModel(
        "microsoft/Phi-3-mini-4k-instruct",
        {
            "model_type": "phi3",
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "sliding_window": 2047,
            "pad_token_id": 32000,
            **_llama(3072, 8192, 32, 32, 32),
        },
        393_216,
        3.82,
    ),
    # Latents: 61 layers x (512 + 64) x 2 bytes = 70,272
    "DeepSeek-V3": PublicModel(
        "deepseek-ai/DeepSeek-V3",
        {
            "model_type": "deepseek_v3",
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
            **_llama(7168, 18432, 61, 128, 128),
        },
        70_272,
        671.0,
    ),
    # 2 x 24 x 8 x 64 x 2 = 49,152, half of the layers with a window of 128
    "gpt-oss-20b": PublicModel(
        "openai/gpt-oss-20b",
        {
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "quantization_config": {"quant_method": "mxfp4"},
            **_llama(2880, 2880, 24, 64, 8),
        },
        49_152,
        20.9,
    ),
    # 2 x 40 x 2 x 128 x 2 = 40,960
    "GLM-4-9B": PublicModel(
        "zai-org/glm-4-9b-chat-hf",
        {
            "model_type": "glm",
            "vocab_size": 151552,
            "max_position_embeddings": 131072,
            "head_dim": 128,
            "attention_bias": True,
            "pad_token_id": 151329,
            **_llama(4096, 13696, 40, 32, 2),
        },
        40_960,
        9.4,
    ),
}
