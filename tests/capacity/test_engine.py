"""What is planned for this machine is what the engine allocates, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from real_model import gemma3_folder, real_model, smollm2_folder
from tightkv import LLM, plan
from tightkv.calibration import calibrate
from tightkv.config import ModelConfig
from tightkv.engine.arm_spec import parse_arm
from tightkv.engine.llm_engine import LLMEngine
from tightkv.formats import KV_CACHE_DTYPES, write_scales_file
from tightkv.planning import CapacityPlan
from tiny_engine import loaded
from tiny_models import SPECIFIC, save_tiny_model

POOL = 3_000_000
MIXES = ("int8/fp8_e5m2", "float16/int8_per_token_head", "bfloat16/fp8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def saved(folders: Path, model_type: str) -> Path:
    folder = folders / model_type
    return folder if folder.is_dir() else save_tiny_model(folder, model_type)


def engine_of(model: Any, entry: str, **options: Any) -> LLMEngine:
    spec = parse_arm(entry)
    formats = {
        "k_cache_dtype": spec.k_cache_dtype,
        "v_cache_dtype": spec.v_cache_dtype,
        "quantization_config_path": spec.path,
    }
    return LLM(model, **{"kv_cache_memory_bytes": POOL, **formats, **options}).engine


def part(planned: CapacityPlan, key: str) -> int:
    return next(term.size.best for term in planned.waterfall if term.key == key)


def check(planned: CapacityPlan, index: int, engine: LLMEngine) -> None:
    formats, actual = planned.formats[index], engine.plan
    assert formats.fits
    assert formats.bytes_per_block == actual.bytes_per_block
    assert formats.num_blocks == actual.num_blocks
    assert formats.pool_bytes == actual.pool_bytes
    assert formats.num_tokens.best == actual.num_tokens
    for length, requests in (
        (planned.settings.max_model_len, formats.requests_at_max_len),
        (planned.settings.typical_len, formats.requests_at_typical_len),
    ):
        assert requests == pytest.approx(actual.max_concurrency(length))
    assert part(planned, "weights") == engine.pool_request.weight_bytes


@pytest.mark.parametrize("model_type", SPECIFIC)
def test_all_formats_and_mixes(folders: Path, model_type: str) -> None:
    folder = saved(folders, model_type)
    entries = (*KV_CACHE_DTYPES, *MIXES)
    planned = plan(str(folder), kv_cache_dtypes=entries, kv_cache_memory_bytes=POOL)
    for index, entry in enumerate(entries):
        engine = engine_of(loaded(folder), entry)
        check(planned, index, engine)
    # A step's results: equal, but for joined products that only run here, and experts.
    loose = {"starcoder2": 0.06, "gpt_oss": 0.03}.get(model_type, 1e-9)
    peak = engine.pool_request.peak_bytes
    assert part(planned, "activations") == pytest.approx(peak, rel=loose)


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("pool", [100_000, POOL])
def test_what_windows_leave_room_for(folders: Path, model_type: str, pool: int) -> None:
    """Requests, their bytes and the longest one, with five layers of six with a window or all."""
    kinds = [*["sliding_attention"] * 5, "full_attention"]
    layers = {"num_hidden_layers": 6, "layer_types": kinds} if "gemma" in model_type else {}
    folder = folders / f"windows {model_type}"
    if not folder.is_dir():
        save_tiny_model(folder, model_type, **{"sliding_window": 16, **layers})
    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 32}
    planned = plan(
        str(folder), kv_cache_dtypes=("auto", "int8"), kv_cache_memory_bytes=pool, **options
    )
    assert "note_window_tightkv" in {note.key for note in planned.notes}
    for index, entry in enumerate(("auto", "int8")):
        engine = engine_of(loaded(folder), entry, kv_cache_memory_bytes=pool, **options)
        check(planned, index, engine)
        formats, actual = planned.formats[index], engine.plan
        assert formats.longest_context == actual.max_model_len
        assert formats.request_bytes == actual.footprint.most(planned.settings.max_model_len)
        assert engine.storage.num_bytes == formats.pool_bytes <= pool
        # 512 tokens have 32 blocks, a window with a chunk at most 4.
        full = 32 if layers else 0
        assert engine.manager.blocks_for(512) == full + 4 * (
            len(actual.footprint.groups) - bool(full)
        )


@pytest.mark.parametrize("layers", [("0",), ("-1",), ("sliding_window",)], ids=str)
def test_skipped_layers(folders: Path, layers: tuple[str, ...]) -> None:
    folder = saved(folders, "gemma3_text")
    options: dict[str, Any] = {"kv_cache_dtype_skip_layers": layers, "block_size": 32}
    planned = plan(
        str(folder),
        kv_cache_dtypes=("int8",),
        kv_cache_memory_bytes=POOL,
        max_num_seqs=3,
        **options,
    )
    check(planned, 0, engine_of(loaded(folder), "int8", max_num_seqs=3, **options))
    assert len(planned.formats[0].formats) == 2


def test_a_scales_file(folders: Path, tmp_path: Path) -> None:
    folder = saved(folders, "qwen3")
    path = tmp_path / "scales.json"
    text = ["The lighthouse stood on the rock, and the sea went round it. " * 30]
    config = ModelConfig(model=str(folder))
    options: dict[str, Any] = {"num_samples": 4, "max_seq_len": 64, "static": True}
    write_scales_file(path, calibrate(config, text, **options).file)
    planned = plan(str(folder), kv_cache_dtypes=(f"auto@{path}",), kv_cache_memory_bytes=POOL)
    check(planned, 0, engine_of(loaded(folder), f"auto@{path}"))
    assert planned.formats[0].effective_bits == 8
    # The same as what --static supposes before anything is calibrated.
    supposed = plan(str(folder), kv_cache_dtypes=("int8",), kv_cache_memory_bytes=POOL, static=True)
    assert supposed.formats[0].bytes_per_block == planned.formats[0].bytes_per_block


@pytest.mark.parametrize("length", [None, 64, 500])
def test_lengths_and_cuts(folders: Path, length: int | None) -> None:
    """A pool cut to what all sequences can need, and one that shortens the longest sequence."""
    folder = saved(folders, "llama")
    for pool in (40_000, POOL):
        options: dict[str, Any] = {"max_model_len": length, "kv_cache_memory_bytes": pool}
        planned = plan(str(folder), kv_cache_dtypes=("auto",), max_num_seqs=2, **options)
        if length == 500 and pool == 40_000:
            assert not planned.fits
            continue
        engine = engine_of(loaded(folder), "auto", max_num_seqs=2, **options)
        assert planned.formats[0].num_blocks == engine.plan.num_blocks
        assert planned.fits


def test_the_pool_of_what_is_left(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a given size: utilization of the memory, less weights and a step's results."""
    folder = saved(folders, "llama")
    total = 40_000_000
    monkeypatch.setattr("tightkv.planning.hardware.available_memory", lambda: total)
    planned = plan(str(folder), kv_cache_dtypes=("int8",), max_num_seqs=4096)
    model = real_model(folder)
    monkeypatch.setattr(
        "tightkv.engine.runtime.available_memory", lambda: total - model.weight_bytes
    )
    engine = LLM(
        model, kv_cache_dtype="int8", max_num_seqs=4096, max_num_batched_tokens=4096
    ).engine
    wide = plan(
        str(folder), kv_cache_dtypes=("int8",), max_num_seqs=4096, max_num_batched_tokens=4096
    )
    check(wide, 0, engine)
    assert planned.pool.best > wide.pool.best


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models_in_all_formats(name: str, tmp_path: Path) -> None:
    folder = smollm2_folder() if name == "smollm2" else gemma3_folder(tmp_path)
    model = real_model(folder)
    entries = (*KV_CACHE_DTYPES, *MIXES)
    options: dict[str, Any] = {"max_model_len": 4096, "kv_cache_memory_bytes": 256 << 20}
    planned = plan(str(folder), kv_cache_dtypes=entries, **options)
    for index, entry in enumerate(entries):
        engine = engine_of(model, entry, **options)
        check(planned, index, engine)
    assert part(planned, "activations") == engine.pool_request.peak_bytes


def test_the_recommended_number_of_requests_does_not_follow_the_one_given(folders: Path) -> None:
    """The engine makes no more blocks than they need, and would make more for more of them."""
    folder = str(saved(folders, "llama"))
    numbers = set()
    for max_num_seqs in (2, 8):
        planned = plan(folder, kv_cache_memory_bytes=64 << 20, max_num_seqs=max_num_seqs)
        assert planned.formats[0].pool_bytes < planned.pool.best
        numbers |= {
            message.values["number"]
            for message in planned.recommendation
            if message.key == "rec_max_num_seqs"
        }
    assert len(numbers) == 1
    assert min(numbers) > 8
