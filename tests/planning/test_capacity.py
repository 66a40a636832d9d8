"""Waterfall, requests and advice, on facts made up so that they can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tightkv.errors import ConfigError
from tightkv.formats import resolve_format
from tightkv.kvcache import KVCacheSpec
from tightkv.planning import (
    CapacityPlan,
    FormatChoice,
    ModelFacts,
    Parameter,
    PlanSettings,
    Texts,
    as_markdown,
    check_heads,
    find_hardware,
    plan_capacity,
    report,
)
from tightkv.planning.sharding import rank_share

GIB = 2**30
LAYERS = 4

MODEL = ModelFacts(
    name="made-up",
    model_type="llama",
    num_layers=LAYERS,
    num_shared_layers=0,
    num_heads=8,
    num_kv_heads=2,
    head_size=128,
    value_size=128,
    kv_values=LAYERS * 2 * 256,
    max_position=32768,
    vocab_size=1000,
    dtype="bfloat16",
    dtype_bytes=2,
    parameters=(
        Parameter("layers.0.self_attn.q_proj.weight", (1024, 1024)),
        Parameter("layers.0.self_attn.k_proj.weight", (256, 1024)),
        Parameter("layers.0.norm.weight", (1024,)),
        Parameter("layers.0.mlp.experts.down_proj", (8, 1024, 1024)),
        Parameter("layers.0.mlp.gate.weight", (8, 1024)),
    ),
    weight_bytes=(10 * GIB, 10 * GIB, 10 * GIB),
    weight_source="files",
    activation_bytes=100_000.0,
    hidden_bytes=2048,
    num_experts=8,
    experts_per_token=2,
)
SETTINGS = PlanSettings(
    engine="vllm",
    tensor_parallel_size=1,
    replicas=1,
    max_model_len=8192,
    is_length_given=True,
    typical_len=1000,
    gpu_memory_utilization=0.9,
    kv_cache_memory_bytes=None,
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    concurrency=None,
)


def choice(name: str, windows: tuple[int | None, ...] = (None,) * LAYERS) -> FormatChoice:
    stored = resolve_format(name, torch.bfloat16)
    specs = tuple(
        KVCacheSpec(
            layer_idx=layer,
            block_size=16,
            num_kv_heads=2,
            head_size=128,
            value_size=128,
            k_format=stored,
            v_format=stored,
            sliding_window=window,
        )
        for layer, window in enumerate(windows)
    )
    return FormatChoice(name, specs)


def planned(
    *names: str,
    hardware: str = "custom:20GiB,bandwidth=1TB/s,flops=100TFLOPS",
    model: ModelFacts = MODEL,
    choices: tuple[FormatChoice, ...] = (),
    **settings: Any,
) -> CapacityPlan:
    chosen = choices or tuple(choice(name) for name in names or ("bfloat16", "fp8", "int8"))
    made = replace(SETTINGS, **settings)
    return plan_capacity(model, chosen, find_hardware(hardware), made, 200 * 2**20)


def terms(plan: CapacityPlan) -> dict[str, Any]:
    return {term.key: term.size for term in plan.waterfall}


def advice(plan: CapacityPlan) -> str:
    return plan.recommendation[0].key


def test_the_waterfall_adds_up() -> None:
    plan = planned()
    size = terms(plan)
    assert size["total"].best == 20 * GIB
    for own, others in (("low", "high"), ("best", "best"), ("high", "low")):
        rest = getattr(size["total"], own) - getattr(size["unused"], own)
        rest -= sum(getattr(size[name], others) for name in ("weights", "activations", "reserve"))
        assert getattr(size["pool"], own) == rest
    assert size["pool"].low < size["pool"].best < size["pool"].high


def test_requests_by_hand() -> None:
    """4 layers x 2 heads x 256 values x 2 bytes = 4,096 bytes; 64 KiB a block of 16 tokens."""
    plan = planned("bfloat16", "int8")
    wide, narrow = plan.formats
    pool = plan.pool.best
    assert wide.bytes_per_token == 4096
    assert wide.num_blocks == pool // 65536
    assert wide.num_tokens.best == wide.num_blocks * 16
    assert wide.request_bytes == 8192 * 4096
    assert wide.requests_at_max_len == pytest.approx(pool / (8192 * 4096))
    # 1,000 tokens take 63 blocks.
    assert wide.requests_at_typical_len == pytest.approx(pool / (63 * 65536))
    # One scale of 2 bytes for 128 values of 1 byte, rounded to lines of 64 bytes.
    assert narrow.effective_bits == 8.125
    assert narrow.bytes_per_token == 4 * 2 * 2 * (128 + 2)
    assert narrow.longest_context == MODEL.max_position


def test_the_longest_context_is_what_the_pool_holds() -> None:
    plan = planned("bfloat16", kv_cache_memory_bytes=10 * 65536 + 1)
    assert plan.formats[0].longest_context == 160
    assert not plan.fits
    assert advice(plan) == "rec_shorter"
    windows = (64, 64, None, None)
    plan = planned(
        choices=(choice("bfloat16", windows),), kv_cache_memory_bytes=10 * 65536, max_model_len=64
    )
    # Each layer's block has 16 KiB; two layers stop at 5 blocks: (40 - 10) / 2 blocks of 16.
    assert plan.formats[0].longest_context == 15 * 16


def test_pages_of_tightkv_and_their_padding() -> None:
    """Three layers with a window of 64 and one without: pages of one layer, 16 KiB a block."""
    windows = choice("bfloat16", (64, 64, 64, None))
    options: dict[str, Any] = {
        "hardware": "host",
        "engine": "tightkv",
        "kv_cache_memory_bytes": 1000 * 16384 + 1,
        "max_num_seqs": 1000,
        "max_num_batched_tokens": 256,
        "gpu_memory_utilization": 1.0,
    }
    model = replace(MODEL, weight_bytes=(0, 0, 0))
    plan = planned(choices=(windows,), model=model, **options)
    (formats,) = plan.formats
    assert (formats.bytes_per_block, formats.num_blocks, formats.padding) == (16384, 1000, 0)
    assert formats.num_tokens.best == 250 * 16
    # 64 + 256 - 1 tokens lie in 21 blocks at most, and 64 in 5 while a request decodes.
    assert formats.request_bytes == (512 + 3 * 21) * 16384
    assert formats.requests_at_max_len == pytest.approx(1 + (1000 - 575) / (512 + 15))
    assert "note_padding" not in {note.key for note in plan.notes}
    # 4,096 and 4 x 2,080 bytes a token: a page takes three layers of 8 bits or one of 16.
    narrow = choice("int8", (None,) * 2).specs
    mixed = replace(windows, specs=(*choice("bfloat16", (64,)).specs, *narrow, *narrow))
    (formats,) = planned(choices=(mixed,), model=model, **options).formats
    used = formats.bytes_per_token * (1 - formats.padding)
    assert used == pytest.approx(1024 + 4 * 2 * 2 * 130)


def test_decode_is_a_roofline() -> None:
    """64 requests of 1,000 tokens: 10 GiB of weights, of which 8 experts are all touched."""
    plan = planned("bfloat16")
    decode = plan.formats[0].decode
    assert decode is not None
    assert decode.num_requests == 64
    touched = 1 - (1 - 2 / 8) ** 64
    experts = rank_share(MODEL, 1, experts=True)
    weights = 10 * GIB * (1 - experts + experts * touched)
    kv = 64 * 1000 * 4096
    assert decode.tokens_per_second == pytest.approx(64 * 1e12 / (weights + kv))
    assert decode.kv_share == pytest.approx(kv / (weights + kv))
    assert decode.bound == "memory"
    assert planned("bfloat16", hardware="custom:20GiB").formats[0].decode is None


def test_shares_of_the_weights() -> None:
    """Of 4 devices each has a quarter, but half of k_proj (2 heads), norm and router whole."""
    q, k, norm, experts, router = (parameter.size for parameter in MODEL.parameters)
    held = q / 4 + k / 2 + norm + experts / 4 + router
    assert rank_share(MODEL, 4) == pytest.approx(held / MODEL.num_parameters)


@pytest.mark.parametrize(
    ("hardware", "key"),
    [("h100-80g", "rec_fp8"), ("a100-80g", "rec_int8"), ("v100", "rec_int8"), ("l4", "rec_fp8")],
)
def test_the_precision_by_hardware(hardware: str, key: str) -> None:
    plan = planned(hardware=hardware, concurrency=1, max_num_seqs=100_000, max_model_len=8192)
    plan = planned(hardware=hardware, max_num_seqs=100_000)
    assert advice(plan) == key
    assert plan.recommendation[0].values["name"] == ("fp8" if key == "rec_fp8" else "int8")


def test_where_precision_does_not_help() -> None:
    weights = replace(MODEL, weight_bytes=(30 * GIB,) * 3)
    plan = planned(model=weights)
    assert advice(plan) == "rec_weights"
    assert not plan.fits
    # 8 requests of 1,000 tokens: 32 MB of K and V, 10 GiB of weights.
    assert advice(planned(max_num_seqs=8)) == "rec_no_help_weights"
    slow = "custom:20GiB,bandwidth=100TB/s,flops=1GFLOPS"
    assert advice(planned(max_num_seqs=8, hardware=slow)) == "rec_no_help_compute"
    assert advice(planned(max_num_seqs=8, hardware="custom:20GiB")) == "rec_no_help_room"
    small = replace(MODEL, weight_bytes=(2**20,) * 3)
    assert advice(planned(max_num_seqs=64, model=small)) == "rec_speed_only"


def test_concurrency_decides_what_fits() -> None:
    plan = planned(concurrency=300)
    wide, narrow = plan.formats[0], plan.formats[2]
    assert not wide.fits
    assert narrow.fits
    assert plan.fits
    assert wide.needed[0].pool_bytes == 300 * 8192 * 4096
    rest = sum(terms(plan)[name].best for name in ("weights", "activations", "reserve"))
    assert wide.needed[0].device_bytes == int((300 * 8192 * 4096 + rest) / 0.9)
    assert advice(planned(concurrency=10_000)) == "rec_too_many"


def test_max_num_seqs_uses_at_most_six_tenths() -> None:
    plan = planned(max_num_seqs=100_000)
    message = next(m for m in plan.recommendation if m.key == "rec_max_num_seqs")
    narrow = next(f for f in plan.formats if f.name == message.values["name"])
    assert message.values["number"] == int(0.6 * narrow.requests_at_typical_len)
    assert 0.59 < message.values["use"] <= 0.6


def test_long_contexts_are_told_of_the_mix() -> None:
    """1 of 4 layers wide: a quarter of 4,096 bytes and three of 2,080."""
    plan = planned(max_model_len=32768, max_num_seqs=100_000)
    mix = next(m for m in plan.recommendation if m.key == "rec_mix")
    assert mix.values["kept"] == 1
    assert mix.values["per_token"] == pytest.approx((4096 + 3 * 2080) / 4)


def test_heads_must_be_shared_evenly() -> None:
    check_heads([8], 4)
    with pytest.raises(ConfigError, match="choose one of 1, 2, 4, 8"):
        check_heads([8], 3)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_reports_are_whole(language: str) -> None:
    """Every sentence finds its values, in every kind of plan."""
    texts = Texts(language)
    plans = (
        planned(concurrency=3),
        planned(max_num_seqs=100_000, max_model_len=40_000),
        planned(tensor_parallel_size=4, replicas=2),
        planned(hardware="custom:20GiB", kv_cache_memory_bytes=2**20),
        planned(choices=(choice("int8", (64, None, None, None)),), max_num_seqs=8),
        planned(model=replace(MODEL, weight_bytes=(30 * GIB,) * 3)),
        planned(model=replace(MODEL, num_shared_layers=2, not_served="so.", parts=("eyes",))),
    )
    for plan in plans:
        text = as_markdown(report(plan, texts))
        assert "{" not in text
        assert text.count("\n## ") >= 4
        assert plan.to_json()["schema_version"] == 1
