"""Decodes of a model with random weights through the engine, at one budget for the KV cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from benchmarks.gpu.clock import Budget
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tightkv import EngineConfig, LLMEngine, SamplingParams
from tightkv.models import LoadedModel, ModelIdentity
from tightkv.models.linear import pack_linear_layers

ARMS = ("float16", "int8")
_WARM_UP_STEPS = 4
_STEPS_BEFORE = 48  # at most, the warm-up included: the first decode while others are prefilled


@dataclass(frozen=True)
class ServingSizes:
    """A model's shape, Llama-3-8B's by default, and what is asked of it.

    Attributes:
        prompt_len: tokens of a request's prompt.
        num_steps: decodes that are timed, of all requests together.
        budget_bytes: of the KV cache, for either format.
    """

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    vocab_size: int = 128256
    prompt_len: int = 1984
    num_steps: int = 48
    budget_bytes: int = 8 * 2**30

    @property
    def request_len(self) -> int:
        """Tokens of a request at its end, which none reaches while steps are timed."""
        return self.prompt_len + _STEPS_BEFORE + self.num_steps


def random_model(sizes: ServingSizes, device: torch.device) -> LoadedModel:
    """Weights drawn on the device; no file is read."""
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
    )
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.train(False).requires_grad_(False)
    if device.type == "cpu":
        pack_linear_layers(model)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    return LoadedModel(
        model=model,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"),
        name="random",
        dtype=dtype,
        eos_token_ids=frozenset({2}),
        max_position=8192,
        vocab_size=sizes.vocab_size,
        identity=ModelIdentity("LlamaForCausalLM", "llama", "random"),
        kv_scales=None,
    )


def serve(model: LoadedModel, kv_cache_dtype: str, sizes: ServingSizes) -> dict[str, object]:
    """As many requests as the budget holds, decoded together: how many, and tokens per second."""
    engine = _engine(model, kv_cache_dtype, sizes)
    block_size = engine.plan.block_size
    blocks_each = -(-sizes.request_len // block_size)
    count = engine.plan.num_blocks // blocks_each
    params = SamplingParams(
        temperature=0,
        max_tokens=sizes.request_len - sizes.prompt_len,
        ignore_eos=True,
        detokenize=False,
    )
    for i in range(count):
        prompt = [(31 * i + 7 * j) % (sizes.vocab_size - 3) + 3 for j in range(sizes.prompt_len)]
        engine.add_request(str(i), prompt, params)
    while not _all_decode(engine, count):
        engine.step()
    for _ in range(_WARM_UP_STEPS):
        engine.step()
    before, begin = engine.stats.generation_tokens, time.perf_counter()
    for _ in range(sizes.num_steps):
        engine.step()
    seconds = time.perf_counter() - begin
    decoded = engine.stats.generation_tokens - before
    if engine.stats.num_preemptions or decoded != count * sizes.num_steps:
        raise RuntimeError(f"{count} requests of {sizes.request_len} tokens do not stay together")
    for request in engine.requests:
        engine.abort_request(request.request_id)
    return {
        "kv_cache_dtype": kv_cache_dtype,
        "budget_bytes": sizes.budget_bytes,
        "request_tokens": sizes.request_len,
        "requests_held": count,
        "ms_per_step": 1e3 * seconds / sizes.num_steps,
        "tokens_per_s": decoded / seconds,
    }


def serving_times(
    device: torch.device, sizes: ServingSizes, budget: Budget
) -> Iterator[dict[str, object]]:
    """One after the other, with the same model."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = random_model(sizes, device)
    for kv_cache_dtype in ARMS:
        if budget.has_time_for(kv_cache_dtype):
            yield serve(model, kv_cache_dtype, sizes)


def _engine(model: LoadedModel, kv_cache_dtype: str, sizes: ServingSizes) -> LLMEngine:
    options: dict[str, object] = {
        "model": model.name,
        "kv_cache_dtype": kv_cache_dtype,
        "kv_cache_memory_bytes": sizes.budget_bytes,
        "max_model_len": sizes.request_len,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
    }
    if model.model.device.type == "cuda":
        options |= {"device": "cuda", "allow_untested_device": True}
    return LLMEngine(EngineConfig.from_options(options), model=model)


def _all_decode(engine: LLMEngine, count: int) -> bool:
    running = engine.scheduler.running
    return len(running) == count and all(sequence.is_decoding for sequence in running)
