"""Many requests through a pool that is far too small get the tokens of a pool without limit."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest

from tightkv import LLM, SamplingParams
from tightkv.engine.request import Request
from tightkv.formats import KV_CACHE_DTYPES
from tiny_engine import tiny_llm
from tiny_models import VOCAB_SIZE, save_tiny_model

NUM_BLOCKS, BLOCK_SIZE = 40, 16
Job = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a layer group that has a window, besides one that has none."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "gemma3_text", "gemma3_text")


def jobs(count: int) -> list[Job]:
    """Prompts that begin as others do, for an odd number of tokens; answers of 1 to 79 tokens."""
    source = random.Random(1)
    tokens = range(VOCAB_SIZE - 4)
    beginnings = [source.choices(tokens, k=96) for _ in range(3)]
    return [
        (
            source.choice(beginnings)[: source.randrange(1, 96, 2)]
            + source.choices(tokens, k=source.randint(0, 12)),
            SamplingParams(
                temperature=0,
                max_tokens=source.choice([1, 8, 20, 40, 79]),
                ignore_eos=True,
                detokenize=False,
            ),
        )
        for _ in range(count)
    ]


def run(
    llm: LLM, todo: list[Job], abort_seed: int | None
) -> tuple[list[tuple[int, ...]], set[int]]:
    """Tokens of each request, some of which come later than others, and which were aborted."""
    engine, source, aborted = llm.engine, random.Random(abort_seed), set[int]()
    requests: list[Request] = []
    while len(requests) < len(todo) or engine.has_unfinished_requests:
        for prompt, params in todo[len(requests) : len(requests) + 2]:
            requests.append(engine.add_request(str(len(requests)), prompt, params))
        if abort_seed is not None and engine.requests and source.random() < 0.05:
            victim = source.choice(engine.requests).request_id
            engine.abort_request(victim)
            aborted.add(int(victim))
        engine.step()
    engine.check_integrity()
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    assert engine.swap_space is None or engine.swap_space.num_used_slots == 0
    return [request.sequences[0].completion().token_ids for request in requests], aborted


def check(folder: Path, dtype: str, count: int) -> None:
    todo = jobs(count)
    options = {"kv_cache_dtype": dtype, "max_num_seqs": 16}
    roomy = tiny_llm(folder, pool_tokens=1 << 14, enable_prefix_caching=False, **options)
    expected, _ = run(roomy, todo, abort_seed=None)
    assert roomy.engine.stats.num_preemptions == 0
    for prefix_caching, swaps in product((True, False), (True, False)):
        llm = tiny_llm(
            folder,
            pool_tokens=NUM_BLOCKS // len(roomy.engine.storage.groups) * BLOCK_SIZE,
            enable_prefix_caching=prefix_caching,
            debug_integrity=True,  # it checks after every step
            # A tiny model computes faster than a disk writes: `auto` would never swap.
            **({"swap_space": 0.01, "preemption_mode": "swap"} if swaps else {}),
            **options,
        )
        assert llm.engine.manager.num_blocks == NUM_BLOCKS
        llm.engine.scheduler.num_reserved_tokens = 0  # to preempt as often as it can
        tokens, aborted = run(llm, todo, abort_seed=2)
        for number, (got, wanted) in enumerate(zip(tokens, expected, strict=True)):
            assert got == (wanted[: len(got)] if number in aborted else wanted), number
        assert aborted
        check_counters(llm, count)


def check_counters(llm: LLM, num_requests: int) -> None:
    """That it was as tight as it was meant to be, and that what was moved was not computed anew."""
    engine, stats = llm.engine, llm.engine.stats
    shares, swaps = engine.config.cache.enable_prefix_caching, engine.swap_space is not None
    assert stats.num_preemptions > num_requests / 20
    assert (stats.prefix_cache_hits > 0) == shares
    assert stats.num_swaps == (stats.num_preemptions if swaps else 0)
    assert (stats.num_swapped_out_blocks > stats.num_swaps) == swaps
    assert (stats.num_swapped_in_blocks > 0) == swaps
    assert (stats.num_preempted_tokens == 0) == swaps
    assert (stats.num_fetched_tokens > 0) == (shares and swaps)
    assert stats.num_swap_fallbacks == 0


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_tokens_of_a_tight_pool(llama: Path, dtype: str) -> None:
    check(llama, dtype, 30)


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_tokens_of_a_tight_pool_with_windows(gemma3: Path, dtype: str) -> None:
    check(gemma3, dtype, 30)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_tokens_of_a_tight_pool_200_requests(llama: Path, dtype: str) -> None:
    check(llama, dtype, 200)


@pytest.mark.slow
def test_tokens_of_a_tight_pool_with_windows_200_requests(gemma3: Path) -> None:
    check(gemma3, "int8", 200)
