"""Layers with a sliding window hold the blocks of their window, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tightkv import LLM, SamplingParams
from tightkv.engine.snapshot import take_snapshot
from tightkv.errors import InsufficientMemoryError
from tiny_engine import (
    GREEDY,
    generate_with_transformers,
    loaded,
    prompts,
    tiny_llm,
    token_ids,
)
from tiny_models import save_tiny_model

WINDOW, CHUNK, BLOCK = 16, 24, 16
LONG = prompts(1, 16 * WINDOW)
NUM_TOKENS = 16 * WINDOW + 16  # prompt and answer
# The last window and chunk together, which can begin at the end of a block.
WINDOW_BLOCKS = -(-(WINDOW + CHUNK) // BLOCK) + 1
WHOLE_BLOCKS = NUM_TOKENS // BLOCK
GEMMA = {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}


def used_at_most(llm: LLM) -> tuple[int, ...]:
    """Run the request to its end; the blocks of each group that were in use at once."""
    llm.engine.add_request("long", LONG[0], GREEDY)
    most = [0] * len(llm.engine.storage.groups)
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        most = [max(pair) for pair in zip(most, llm.engine.manager.num_used_blocks(), strict=True)]
    return tuple(most)


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gemma3_text", "gpt_oss"])
@pytest.mark.filterwarnings("ignore")  # of transformers.generate
def test_16_windows_in_a_pool_that_cannot_hold_them_whole(model_type: str, tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"sliding_window": WINDOW}
    if model_type == "gemma3_text":
        overrides |= GEMMA
    folder = save_tiny_model(tmp_path / model_type, model_type, **overrides)
    expected = generate_with_transformers(model_type, LONG[0], **overrides)

    engine = tiny_llm(folder, max_num_batched_tokens=CHUNK).engine
    plan = engine.plan
    windows = [window for window, _ in plan.footprint.groups]
    blocks = [WHOLE_BLOCKS if window is None else WINDOW_BLOCKS for window in windows]
    assert engine.manager.blocks_for(NUM_TOKENS) <= sum(blocks)
    num_bytes = sum(blocks) * plan.bytes_per_block
    assert num_bytes < NUM_TOKENS * plan.bytes_per_token
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": CHUNK,
        "max_model_len": NUM_TOKENS,
        "kv_cache_memory_bytes": num_bytes,
    }
    llm = LLM(loaded(folder), **options)
    assert token_ids(llm, LONG) == [expected]
    assert token_ids(llm, LONG) == [expected]
    for most, bound in zip(used_at_most(llm), blocks, strict=True):
        assert most <= bound
    assert llm.engine.stats.num_preemptions == 0
    with pytest.raises(InsufficientMemoryError, match="one sequence of 272 tokens"):
        LLM(loaded(folder), **{**options, "kv_cache_memory_bytes": num_bytes // 2})


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gemma"
    return save_tiny_model(folder, "gemma3_text", sliding_window=WINDOW, **GEMMA)


def test_groups_of_equal_size_share_the_pool(gemma: Path) -> None:
    """Five layers with a window and one without: pages of one layer each."""
    llm = tiny_llm(gemma, max_num_batched_tokens=CHUNK)
    groups = llm.engine.storage.groups
    assert [group.sliding_window for group in groups] == [WINDOW] * 5 + [None]
    plan = llm.engine.plan
    assert plan.pool_bytes == llm.engine.storage.num_bytes
    most = used_at_most(llm)
    assert most[-1] == WHOLE_BLOCKS
    assert max(most[:-1]) <= WINDOW_BLOCKS
    # Of 1,024 tokens in all layers: in decode each sequence holds 17 blocks and 5 times 2.
    assert plan.max_concurrency(NUM_TOKENS) > 2 * plan.num_tokens / NUM_TOKENS


def test_requests_that_fit_are_those_of_the_plan(gemma: Path) -> None:
    engine = tiny_llm(gemma, max_num_batched_tokens=512).engine
    for num_tokens in (20, 100, 400):
        fitting = take_snapshot(engine).requests_that_fit(num_tokens)
        assert fitting == engine.plan.max_concurrency(num_tokens)
        assert fitting > engine.plan.num_blocks / engine.manager.blocks_for(400) > 0


def test_a_prefix_hit_takes_only_the_window_of_window_layers(gemma: Path) -> None:
    llm = tiny_llm(gemma, max_num_batched_tokens=CHUNK)
    expected = token_ids(llm, LONG)
    llm.engine.add_request("again", LONG[0], GREEDY)
    llm.engine.step()
    (request,) = llm.engine.requests
    assert request.sequences[0].num_cached_tokens == len(LONG[0]) - BLOCK
    used = llm.engine.manager.num_used_blocks()
    assert used[-1] == len(LONG[0]) // BLOCK
    assert max(used[:-1]) <= 2
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    assert list(request.output().outputs[0].token_ids) == expected[0]


def test_a_hit_ends_where_a_window_is_still_there(gemma: Path) -> None:
    """What shares the beginning only cannot use it, once its last window has been given away."""
    llm = tiny_llm(gemma, max_num_batched_tokens=CHUNK, pool_tokens=NUM_TOKENS)
    other = [*LONG[0][:128], *prompts(2, 100)[1]]
    alone = token_ids(tiny_llm(gemma), [other])
    token_ids(llm, LONG)
    hits = llm.engine.stats.prefix_cache_hits
    assert token_ids(llm, [other]) == alone
    assert llm.engine.stats.prefix_cache_hits - hits in range(0, 129, BLOCK)


MIXED: dict[str, Any] = {
    "kv_cache_dtype": "int8",
    "kv_cache_dtype_skip_layers": ("full_attention",),
}


@pytest.mark.parametrize(("skipped", "tight"), [("sliding_window", 112), ("5", 176)])
def test_pages_that_go_from_one_format_to_another(gemma: Path, skipped: str, tight: int) -> None:
    """Bytes of int8 are NaN as floats: a page that changes hands must not show them."""
    options: dict[str, Any] = {
        "dtype": "float16",
        "kv_cache_dtype": "int8",
        "kv_cache_dtype_skip_layers": (skipped,),
        "max_num_batched_tokens": CHUNK,
    }
    together = [*prompts(4), *LONG]
    alone = tiny_llm(gemma, max_num_seqs=1, enable_prefix_caching=False, **options)
    expected = [token_ids(alone, [prompt])[0] for prompt in together]
    for pool_tokens in (1024, tight):
        for prefix_caching in (True, False):
            llm = tiny_llm(
                gemma, pool_tokens=pool_tokens, enable_prefix_caching=prefix_caching, **options
            )
            llm.engine.scheduler.num_reserved_tokens = 0
            assert token_ids(llm, together) == expected
            assert token_ids(llm, together[::-1]) == expected[::-1]
            assert (llm.engine.stats.num_preemptions > 0) == (pool_tokens == tight)
            layouts = {group.layouts[0].k_format for group in llm.engine.storage.groups}
            assert len(layouts) == 2


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_sequences_of_one_request_share_their_prompt(gemma: Path, prefix_caching: bool) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True)
    llm = tiny_llm(gemma, enable_prefix_caching=prefix_caching, max_num_batched_tokens=CHUNK)
    prompt = LONG[0][:100]
    output = llm.generate([prompt], params)[0]
    assert llm.engine.stats.prefix_cache_hits == 2 * 96
    alone = tiny_llm(gemma, max_num_seqs=1).generate([prompt], params)[0]
    assert [completion.token_ids for completion in output.outputs] == [
        completion.token_ids for completion in alone.outputs
    ]
    llm.engine.manager.check_integrity()


def test_a_whole_prompt_in_one_step_is_held_until_decode(gemma: Path) -> None:
    """Without chunked prefill the largest chunk is the longest prompt, and is planned for."""
    options: dict[str, Any] = {"enable_chunked_prefill": False, "max_model_len": NUM_TOKENS}
    llm = tiny_llm(gemma, max_num_batched_tokens=CHUNK, **options)
    expected = token_ids(tiny_llm(gemma), LONG)
    assert token_ids(llm, LONG) == expected
    assert llm.engine.manager.blocks_for(NUM_TOKENS) == 6 * WHOLE_BLOCKS
    llm.engine.manager.reset_prefix_cache()
    llm.engine.add_request("long", LONG[0], GREEDY)
    used = []
    for _ in range(3):
        llm.engine.step()
        used.append(llm.engine.manager.num_used_blocks())
    assert used[0] == (16,) * 6
    assert used[2] == (2,) * 5 + (17,)
