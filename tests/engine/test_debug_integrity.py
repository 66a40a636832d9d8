"""`debug_integrity`: disorder ends the engine, and what is read after it was freed is loud."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tightkv.errors import IntegrityError
from tightkv.formats import KV_CACHE_DTYPES
from tiny_engine import GREEDY, prompts, tiny_llm, token_ids
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def test_disorder_ends_the_step(folder: Path) -> None:
    for debug in (True, False):
        llm = tiny_llm(folder, debug_integrity=debug)
        llm.engine.add_request("a", prompts(1)[0], GREEDY)
        llm.engine.step()
        pool = llm.engine.manager._pools[0]
        pool._ref_counts[pool.allocate(1)[0]] += 1
        if not debug:
            llm.engine.step()  # nobody looks
            continue
        with pytest.raises(IntegrityError, match=r"leaks\): restart it") as caught:
            llm.engine.step()
        assert str(caught.value).endswith(".")


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_tokens_are_the_same(folder: Path, prefix_caching: bool) -> None:
    arms = [
        tiny_llm(
            folder,
            pool_tokens=160,
            kv_cache_dtype="int8",
            enable_prefix_caching=prefix_caching,
            debug_integrity=debug,
        )
        for debug in (True, False)
    ]
    for _ in range(2):
        first, second = (token_ids(llm, prompts()) for llm in arms)
        assert first == second


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_a_freed_block_is_not_read_unnoticed(folder: Path, dtype: str) -> None:
    """The second block of a prompt is freed, while its sequence still reads it."""
    llm = tiny_llm(folder, kv_cache_dtype=dtype, enable_prefix_caching=False, debug_integrity=False)
    engine = llm.engine
    expected = token_ids(llm, prompts(1))[0]
    for poisoned in (False, True):
        if poisoned:
            engine.manager.poison_with(engine.storage.poison)
        request = engine.add_request(f"poisoned {poisoned}", prompts(1)[0], GREEDY)
        for _ in range(5):
            engine.step()
        pool, sequence = engine.manager._pools[0], request.sequences[0]
        block = engine.manager.block_tables(sequence.seq_id)[0][1]
        pool.free([block])
        pool.touch([block])
        while engine.has_unfinished_requests:
            engine.step()
        tokens = list(request.output().outputs[0].token_ids)
        assert (tokens == expected) is not poisoned
    is_float = engine.storage.layer(0).layout.v_format.code.dtype.is_floating_point
    assert (request.error is not None) == is_float


def test_a_block_of_somebody_else_is_not_read_unnoticed(folder: Path) -> None:
    """What a sequence has not written yet holds no longer what was there before."""
    llm = tiny_llm(folder, debug_integrity=True)
    engine = llm.engine
    token_ids(llm, prompts(1, 60))
    written = engine.storage.layer(0).blocks.clone()
    engine.add_request("a", prompts(2, 600)[1][:500], GREEDY)
    engine.scheduler.schedule()
    (table,) = engine.manager.block_tables("a/0")
    blocks = engine.storage.layer(0).blocks
    assert any(written[block].any() for block in table)
    assert all((blocks[block] == blocks[table[0], 0]).all() for block in table)
    keys, _ = engine.storage.layer(0).layout.k_codes(blocks[table]).flatten().sort()
    assert torch.isfinite(keys).all()
    assert keys[0] > 1e30


def test_forgotten_content_is_overwritten(folder: Path) -> None:
    llm = tiny_llm(folder, debug_integrity=True)
    token_ids(llm, prompts(1))
    layer = llm.engine.storage.layer(0)
    assert torch.isfinite(layer.layout.k_codes(layer.blocks)).all(dim=(1, 2, 3, 4, 5)).sum() > 1
    llm.engine.manager.reset_prefix_cache()
    used = (layer.blocks != 0).any(dim=1)
    assert torch.isnan(layer.layout.k_codes(layer.blocks)[used]).all()
