from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine_states import BLOCK_BYTES, FULL, NOW, layers, pool, snapshot, state, swapping, tensor
from tightkv.metrics import EngineStats, GroupSnapshot, LayerSnapshot, PoolSnapshot
from tightkv.server.history import History
from tightkv.server.state import MAX_CELLS, PoolState, QualitySummary, ServerFacts, build


def test_it_is_strict_json() -> None:
    made = state(
        quality=QualitySummary(
            sample_rate=0.01, num_requests=0, num_tokens=0, mean_kl=None, same_top=None
        )
    )
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_names_and_health() -> None:
    server = state()["server"]
    assert server["model"] == "SmolLM2-135M-Instruct"
    assert server["uptime"] == NOW
    assert (server["healthy"], server["error"]) == (True, None)
    dead = state(error="The engine has died.")["server"]
    assert (dead["healthy"], dead["error"]) == (False, "The engine has died.")


def test_memory_in_use_counts_shared_blocks_once() -> None:
    memory = state(snapshot(PoolSnapshot(block_bytes=100, blocks="uusscc....")))["memory"]
    assert memory["pool"] == 10 * 100
    assert memory["pool_in_use"] == 4 * 100
    assert memory["weights"] == snapshot().weight_bytes


@pytest.mark.parametrize("num_blocks", [1, 100, 174, 1024, 1025, 20_000, 200_000])
def test_cells_hold_every_block(num_blocks: int) -> None:
    blocks = pool(num_blocks)
    made = _only_pool(blocks)
    cells, size = made["cells"], made["blocks_per_cell"]
    assert len(cells) <= MAX_CELLS
    assert (len(cells) - 1) * size < num_blocks <= len(cells) * size
    for index, letter in enumerate("usc"):
        assert sum(cell[index] for cell in cells) == blocks.blocks.count(letter)
    assert made["in_use"] == blocks.blocks.count("u")
    assert made["free"] == blocks.blocks.count(".")
    middle = len(cells) // 2
    part = blocks.blocks[middle * size : (middle + 1) * size]
    assert cells[middle] == [part.count(letter) for letter in "usc"]


def test_few_blocks_have_a_cell_each() -> None:
    made = _only_pool(PoolSnapshot(block_bytes=1, blocks="us.c"))
    assert made["cells"] == [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]]


def test_prefix_hits_are_a_share_of_the_prompt_tokens() -> None:
    assert state()["prefix_hit_rate"] == pytest.approx(611_227 / 1_421_460)
    assert _build(replace(snapshot(), stats=EngineStats()))["prefix_hit_rate"] is None


def test_swap_space_is_null_without_one() -> None:
    assert state()["swap"] is None
    assert state(swapping())["swap"] == {
        "total": 5650 * BLOCK_BYTES,
        "in_use": 61 * BLOCK_BYTES,
        "kept": 1203 * BLOCK_BYTES,
        "block_bytes": BLOCK_BYTES,
        "sequences": 2,
        "blocks": 61,
        "swaps": 23,
        "fallbacks": 1,
        "blocks_out": 1804,
        "blocks_in": 1621,
    }


def test_requests_have_an_age_where_it_is_known() -> None:
    engine = snapshot()
    made = _build(arrival_times={engine.requests[0].request_id: NOW - 2})["requests"]
    assert made[0]["age"] == pytest.approx(2)
    assert made[1]["age"] is None
    assert made[0] == {
        "id": "chatcmpl-7f3a91c24e0b4d6f",
        "status": "running",
        "prompt_tokens": 412,
        "cached_tokens": 384,
        "computed_tokens": 530,
        "generation_tokens": 119,
        "max_tokens": 256,
        "blocks": 34,
        "age": pytest.approx(2),
    }


def test_history_has_lists_of_one_length() -> None:
    history = state()["history"]
    lengths = {
        len(history["prompt_tokens"]),
        len(history["generation_tokens"]),
        len(history["ttft"]),
        len(history["running"]),
        len(history["waiting"]),
        len(history["kv_usage"]),
    }
    assert lengths == {history["seconds"]} == {300}
    assert history["ttft_p50"] is not None
    assert 0.14 <= history["ttft_p50"] <= 0.64


def test_no_history_yet() -> None:
    history = _build()["history"]
    assert history["ttft"] == []
    assert history["ttft_p50"] is None


def test_format_in_words() -> None:
    mixed = state()["server"]["kv_format"]
    assert mixed == (
        "int8 (8.25 bits, two-factor scales) in 29 of 30 layers; bfloat16 (16 bits) in 1"
    )
    even = replace(snapshot(), layers=layers()[1:])
    assert _build(even)["server"]["kv_format"] == "int8 (8.25 bits, two-factor scales)"
    two = (LayerSnapshot(layer_idx=0, group=0, k=tensor(), v=tensor("bfloat16", bits=16)),)
    assert _build(replace(even, layers=two))["server"]["kv_format"] == (
        "K int8 (8.25 bits, two-factor scales), V bfloat16 (16 bits)"
    )


def test_quality_is_null_while_the_watch_is_off() -> None:
    assert state()["quality"] is None
    summary = QualitySummary(
        sample_rate=0.01, num_requests=3, num_tokens=90, mean_kl=0.0004, same_top=0.98
    )
    assert state(quality=summary)["quality"] == {
        "sample_rate": 0.01,
        "requests": 3,
        "tokens": 90,
        "mean_kl": 0.0004,
        "same_top": 0.98,
    }


def test_layers_tell_k_and_v() -> None:
    made = state()["layers"]
    assert len(made) == 30
    assert made[4]["k"]["clip_rate"] == 0.0031
    assert made[4]["v"] == {
        "format": "int8",
        "granularity": "two_factor",
        "source": "probe",
        "bits": 8.25,
        "clip_rate": 0.0,
    }
    assert state()["pool"]["block_bytes"] == BLOCK_BYTES


def test_groups_with_the_same_window_are_told_together() -> None:
    """A token takes a block of each of the three groups."""
    windows = [GroupSnapshot(sliding_window=512, num_used_blocks=number) for number in (30, 10)]
    made = state(snapshot(PoolSnapshot(block_bytes=1, blocks="." * 20), (), (FULL, *windows)))
    assert made["groups"] == [
        {"sliding_window": None, "in_use": FULL.num_used_blocks},
        {"sliding_window": 512, "in_use": 40},
    ]
    assert made["tokens"] == made["free_tokens"] == 6 * 16


def _only_pool(blocks: PoolSnapshot) -> PoolState:
    return state(snapshot(blocks))["pool"]


def _build(engine: Any = None, **changes: Any) -> Any:
    engine = engine or snapshot()
    facts = ServerFacts(model="m", version="0", chat=True, start_time=0.0)
    options: dict[str, Any] = {"now": NOW, "arrival_times": {}, **changes}
    return build(facts, engine, History(lambda: engine), **options)
