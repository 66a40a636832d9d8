"""Tokens do not depend on batch, chunks, prefix cache or preemption, for any format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from tightkv import LayerScales, SamplingParams, TensorScale
from tightkv.formats import KV_CACHE_DTYPES
from tiny_engine import GREEDY, logits_by_position, prompts, tiny_llm, token_ids
from tiny_models import save_tiny_model

SCALED = {"int8": 0.02, "fp8_e4m3": 0.01, "fp8_e5m2": 0.001}


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with one layer group, one of them with a window, and one with two."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def static_scales(value: float, dynamic: bool) -> dict[int, LayerScales]:
    scale = TensorScale(torch.linspace(value, 2 * value, 32).view(2, 16), dynamic=dynamic)
    return {layer: LayerScales(scale, scale) for layer in range(4)}


# Room for two of the prompts, not for their answers.
TIGHT = 112
QUICK = (("auto", None), ("int8", None), ("int8", True), ("fp8_e4m3", False))


def formats() -> list[ParameterSet]:
    """Each dtype without scales, then the scaled ones static and two-factor."""
    cases: list[tuple[str, bool | None]] = [(dtype, None) for dtype in KV_CACHE_DTYPES]
    cases += [(dtype, dynamic) for dtype in SCALED for dynamic in (False, True)]
    return [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("dtype", "dynamic"), formats())
def test_batch_chunks_prefix_cache_and_preemption(
    folder: Path, dtype: str, dynamic: bool | None
) -> None:
    options: dict[str, object] = {"kv_cache_dtype": dtype}
    if dynamic is not None:
        scales = static_scales(SCALED[dtype], dynamic)
        layers = range(4 if "gemma" in folder.name else 2)
        options["kv_cache_scales"] = {layer: scales[layer] for layer in layers}
    alone = tiny_llm(folder, max_num_seqs=1, enable_prefix_caching=False, **options)
    expected = [token_ids(alone, [prompt])[0] for prompt in prompts()]
    for prefix_caching in (True, False):
        for chunked in (True, False):
            for pool_tokens in (1024, TIGHT):
                llm = tiny_llm(
                    folder,
                    enable_prefix_caching=prefix_caching,
                    enable_chunked_prefill=chunked,
                    max_num_batched_tokens=13 if chunked else 64,
                    pool_tokens=pool_tokens,
                    **options,
                )
                llm.engine.scheduler.num_reserved_tokens = 0
                arm = (prefix_caching, chunked, pool_tokens)
                assert token_ids(llm, prompts()) == expected, arm
                assert token_ids(llm, prompts()) == expected, (*arm, "again")
                stats = llm.engine.stats
                assert (stats.num_preemptions > 0) == (pool_tokens == TIGHT), arm
                assert (stats.prefix_cache_hits > 0) >= (prefix_caching and pool_tokens > TIGHT), (
                    arm
                )


def test_formats_are_really_used(folder: Path) -> None:
    """Logits differ between formats, so the tests above do not compare one thing with itself."""
    seen = []
    for dtype in ("float32", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"):
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
        output = tiny_llm(folder, kv_cache_dtype=dtype).generate(prompts(1), params)[0]
        seen.append(output.outputs[0].cumulative_logprob)
    assert len(set(seen)) == len(seen)


def test_scales_are_really_used(folder: Path) -> None:
    def logprob(value: float) -> float | None:
        layers = range(4 if "gemma" in folder.name else 2)
        scales = {layer: static_scales(value, False)[layer] for layer in layers}
        llm = tiny_llm(folder, kv_cache_dtype="int8", kv_cache_scales=scales)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
        return llm.generate(prompts(1), params)[0].outputs[0].cumulative_logprob

    assert logprob(0.02) != logprob(0.04)


def test_decode_equals_prefill(folder: Path) -> None:
    """The logits after token t are the same bits in a decode step and in a prefill."""
    llm = tiny_llm(folder, kv_cache_dtype="int8", enable_prefix_caching=False)
    prompt = prompts(1, 90)[0]
    decoded = logits_by_position(
        llm,
        prompt[:20],
        SamplingParams(forced_token_ids=prompt[20:], max_tokens=None, detokenize=False),
    )
    prefilled = logits_by_position(llm, prompt, SamplingParams(prompt_logprobs=0, max_tokens=1))
    for position in range(19, len(prompt) - 1):
        assert torch.equal(decoded[position], prefilled[position]), position


def test_weights_of_16_bits_keep_the_bits_too(folder: Path) -> None:
    """In bfloat16 a row's logits are the same alone and in a batch."""
    together = tiny_llm(folder, dtype="bfloat16", kv_cache_dtype="int8")
    alone = tiny_llm(folder, dtype="bfloat16", kv_cache_dtype="int8", max_num_seqs=1)
    assert token_ids(together, prompts()) == token_ids(alone, prompts())
    params = SamplingParams(prompt_logprobs=0, max_tokens=1)
    first = together.generate(prompts(), params)
    again = [alone.generate([prompt], params)[0] for prompt in prompts()]
    assert [o.prompt_logprobs for o in first] == [o.prompt_logprobs for o in again]


def test_sampled_tokens_do_not_depend_on_the_batch(folder: Path) -> None:
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, seed=index, max_tokens=20, ignore_eos=True)
        for index in range(4)
    ]
    batched = tiny_llm(folder).generate(prompts(), params)
    alone = tiny_llm(folder, max_num_seqs=1)
    for prompt, param, output in zip(prompts(), params, batched, strict=True):
        again = alone.generate([prompt], param)[0]
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
    greedy = token_ids(tiny_llm(folder), prompts(), GREEDY)
    assert [list(output.outputs[0].token_ids) for output in batched] != greedy
