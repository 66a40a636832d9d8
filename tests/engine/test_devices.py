"""Devices that are refused, what is recommended on them, and what a captured step is padded to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import numpy
import pytest
import torch

from tightkv.config import DeviceConfig
from tightkv.engine import devices
from tightkv.engine.batch import HOST, BatchArrays, place_batch
from tightkv.engine.device_batch import (
    DevicePlacement,
    ResultsBuffer,
    StagingBuffer,
    bucket_sizes,
    step_bytes,
)
from tightkv.engine.devices import log_device, resolve_device
from tightkv.errors import ConfigError, EngineError
from tightkv.planning import known_hardware

CPU = torch.device("cpu")
CUDA = DeviceConfig(device="cuda")


@contextmanager
def gpu(
    name: str = "NVIDIA A100", capability: tuple[int, int] = (8, 0), hip: str | None = None
) -> Iterator[None]:
    """A machine with this GPU, as far as torch tells."""
    answers = {
        "is_available": True,
        "current_device": 0,
        "get_device_name": name,
        "get_device_capability": capability,
    }
    with ExitStack() as stack:
        for function, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, function, return_value=answer))
        stack.enter_context(mock.patch.object(torch.version, "hip", hip))
        yield


def pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"finds no GPU on this machine.*--device cpu"):
        resolve_device(CUDA)


@pytest.mark.parametrize(
    ("name", "capability", "hip", "words"),
    [
        ("NVIDIA A100", (8, 0), None, "never run on NVIDIA 8.0 (NVIDIA A100), only on CPU, though"),
        ("Tesla V100", (7, 0), None, "never run on NVIDIA 7.0 (Tesla V100), only on CPU (kernels"),
        ("AMD Instinct MI300X", (9, 4), "6.2", "never run on AMD (AMD Instinct MI300X)"),
    ],
)
def test_what_was_never_run_is_refused_unless_told_to_go_on(
    name: str, capability: tuple[int, int], hip: str | None, words: str
) -> None:
    with gpu(name, capability, hip):
        with pytest.raises(ConfigError) as raised:
            resolve_device(CUDA)
        assert words in str(raised.value)
        assert "--allow-untested-device" in str(raised.value)
        device = resolve_device(DeviceConfig(device="cuda", allow_untested_device=True))
        assert device == torch.device("cuda", 0)


def test_what_was_run_needs_no_flag() -> None:
    with gpu(), mock.patch.object(devices, "_RUN_ON", ("CPU", "NVIDIA 8.0")):
        assert resolve_device(CUDA).type == "cuda"
    assert resolve_device(DeviceConfig()) == CPU


def test_another_device() -> None:
    with pytest.raises(ConfigError, match="Unknown device 'xpu': choose auto, cpu or cuda"):
        resolve_device(DeviceConfig(device="xpu"))


@pytest.mark.parametrize(
    ("key", "capability"),
    [("a100-80g", (8, 0)), ("l4", (8, 9)), ("h200", (9, 0)), ("b200", (10, 0)), ("v100", (7, 0))],
)
def test_the_running_device_and_the_catalog_agree(
    key: str, capability: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    hardware = known_hardware()[key]
    caplog.set_level("INFO")
    with gpu(hardware.name, capability):
        log_device(CUDA, torch.device("cuda", 0))
    best = "FP8" if hardware.native_fp8 else "INT8"
    assert f"{best} is recommended for an 8-bit KV cache, since" in caplog.text
    assert hardware.name in caplog.text


def test_enforce_eager_says_that_it_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_device(DeviceConfig(enforce_eager=True), CPU)
    assert "INT8 is recommended" in caplog.text
    assert "enforce_eager changes nothing on a CPU" in caplog.text


def test_buckets() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(8) == (1, 2, 4, 8)
    assert bucket_sizes(12) == (1, 2, 4, 8, 12)


def decode(count: int) -> BatchArrays:
    """Sequences of 17 tokens and more, in blocks 1, 2, …"""
    ids = numpy.arange(count, dtype=numpy.int64)
    table = numpy.arange(1, 2 * count + 1, dtype=numpy.int32).reshape(count, 2)
    return BatchArrays(
        input_ids=ids + 50,
        positions=ids + 16,
        slot_mappings=(table[:, 1] * 16 + ids, ids),
        seq_lens=(ids + 17).astype(numpy.int32),
        query_start_loc=numpy.arange(count + 1, dtype=numpy.int32),
        block_tables=(table, table + 1),
        logit_rows=ids,
        row_start_loc=numpy.arange(count + 1, dtype=numpy.int32),
        max_query_len=1,
    )


def placement(buckets: tuple[int, ...]) -> DevicePlacement:
    staging = StagingBuffer(CPU, pinned, step_bytes(64, 8, 5, 2))
    placed = DevicePlacement(staging, CPU, 64, table_width=5)
    placed.buckets = buckets
    return placed


def test_padding_has_no_key_and_is_written_nowhere() -> None:
    placed = placement((1, 2, 4, 8))
    arrays = placed.fit(decode(3))
    assert arrays.bucket == 4
    batch = place_batch(arrays, placed)
    plain = place_batch(decode(3), HOST)
    assert batch.input_ids.tolist() == [50, 51, 52, 0]
    assert [slots.tolist()[3:] for slots in batch.metadata.slot_mappings] == [[-1], [-1]]
    for padded, expected in zip(batch.metadata.batches, plain.metadata.batches, strict=True):
        assert padded.max_query_len == 1
        assert padded.seq_lens.tolist() == [*expected.seq_lens.tolist(), 0]
        assert padded.query_start_loc.tolist() == [0, 1, 2, 3, 4]
        assert padded.block_table.shape == (4, 5)
        assert torch.equal(padded.block_table[:3, :2], expected.block_table)
    assert batch.logit_rows.tolist() == [0, 1, 2]
    assert batch.metadata.rows is None


def test_other_steps_are_left_as_they_are() -> None:
    placed = placement((1, 2, 4))
    assert placed.fit(decode(5)).bucket == 0  # more than the largest
    prompts = replace(decode(3), seq_lens=numpy.array([17, 2], numpy.int32))
    assert placed.fit(prompts) is prompts
    without_logits = replace(decode(3), logit_rows=numpy.arange(2))
    assert placed.fit(without_logits) is without_logits


def test_a_bucket_keeps_its_addresses() -> None:
    """What a captured step reads lies where it lay, whatever is sent along."""
    placed = placement((4,))
    first = place_batch(placed.fit(decode(4)), placed)
    second = place_batch(placed.fit(decode(3)), placed, sampling=[numpy.ones((3, 7))])
    for one, other in (
        (first.input_ids, second.input_ids),
        (first.positions, second.positions),
        (first.metadata.bad_tokens, second.metadata.bad_tokens),
        *zip(first.metadata.slot_mappings, second.metadata.slot_mappings, strict=True),
        *(
            pair
            for a, b in zip(first.metadata.batches, second.metadata.batches, strict=True)
            for pair in (
                (a.seq_lens, b.seq_lens),
                (a.query_start_loc, b.query_start_loc),
                (a.block_table, b.block_table),
            )
        ),
    ):
        assert one.data_ptr() == other.data_ptr()
        assert one.data_ptr() % 16 == placed.place([numpy.ones(1)])[0].data_ptr() % 16


def test_buffers_hold_what_they_are_given() -> None:
    arrays = [
        numpy.arange(3),
        numpy.ones((2, 0)),
        numpy.array([[1.5], [2.5]]),
        numpy.zeros(5, bool),
    ]
    staging = StagingBuffer(CPU, pinned, 16, grows=True)
    results = ResultsBuffer(CPU, pinned, 16)
    for array, tensor in zip(arrays, staging.place(arrays), strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
    fetched = results.fetch(staging.place(arrays))
    for array, back in zip(arrays, fetched, strict=True):
        assert back.dtype == array.dtype
        assert numpy.array_equal(back, array)
    with pytest.raises(EngineError, match="were planned"):
        StagingBuffer(CPU, pinned, 16).place(arrays)
