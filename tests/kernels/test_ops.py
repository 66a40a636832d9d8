"""What the operations refuse, and how a backend is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cache_cases import ISAS, make_scene
from tightkv.errors import KernelError
from tightkv.kernels import (
    AttentionBatch,
    AttentionParams,
    LayerCache,
    paged_attention,
    reshape_and_cache,
    select_backend,
)
from tightkv.kernels.cpu import ISA_VARIABLE, CpuBackend, available_isas
from tightkv.kernels.ops import ReferenceBackend

SCENE = make_scene(lengths=((2, 20), (1, 5)), head_size=8, value_size=4)
PLAIN = AttentionParams(softmax_scale=1.0)


def backend_of(isa: str) -> CpuBackend | ReferenceBackend:
    return ReferenceBackend() if isa == "reference" else CpuBackend(isa)


def is_one_sentence(message: str) -> bool:
    return message.endswith(".") and ". " not in message and "\n" not in message


@pytest.mark.parametrize("isa", [ISAS[0], "reference"])
@pytest.mark.parametrize(
    ("key", "value", "num_flags", "name"),
    [
        ((3, 2, 7), (3, 2, 4), 3, "key"),
        ((3, 1, 8), (3, 2, 4), 3, "key"),
        ((2, 2, 8), (3, 2, 4), 3, "key"),
        ((3, 2, 8), (3, 2, 8), 3, "value"),
        ((3, 2, 8), (4, 2, 4), 3, "value"),
        ((3, 2, 8), (3, 2, 4), 2, "bad_tokens"),
    ],
)
def test_write_refuses_wrong_shapes(
    isa: str,
    key: tuple[int, ...],
    value: tuple[int, ...],
    num_flags: int,
    name: str,
) -> None:
    before = SCENE.cache.blocks.clone()
    with pytest.raises(KernelError) as error:
        reshape_and_cache(
            backend_of(isa),
            SCENE.cache,
            torch.zeros(key),
            torch.zeros(value),
            torch.arange(3),
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(num_flags, dtype=torch.bool),
        )
    message = str(error.value)
    assert message.startswith(f"{name} has shape [")
    assert is_one_sentence(message)
    assert torch.equal(SCENE.cache.blocks, before)


@pytest.mark.parametrize("isa", [ISAS[0], "reference"])
@pytest.mark.parametrize(
    ("shape", "sinks", "text"),
    [
        ((3, 4, 9), None, "query has shape [3, 4, 9], but needs [3, 4, 8]."),
        ((3, 3, 8), None, "3 query heads cannot share 2 KV heads"),
        ((3, 4, 8), (3,), "sinks has shape [3], but needs [4]."),
    ],
)
def test_attention_refuses_wrong_shapes(
    isa: str,
    shape: tuple[int, ...],
    sinks: tuple[int, ...] | None,
    text: str,
) -> None:
    params = AttentionParams(1.0, sinks=None if sinks is None else torch.zeros(sinks))
    with pytest.raises(KernelError) as error:
        paged_attention(backend_of(isa), torch.zeros(shape), SCENE.cache, SCENE.batch, params)
    assert text in str(error.value)
    assert is_one_sentence(str(error.value))


@pytest.mark.parametrize("isa", ISAS)
def test_channels_must_touch(isa: str) -> None:
    query = torch.zeros(3, 8, 4).transpose(1, 2)
    with pytest.raises(KernelError, match="Channels must be contiguous") as error:
        paged_attention(CpuBackend(isa), query, SCENE.cache, SCENE.batch, PLAIN)
    assert is_one_sentence(str(error.value))


def write_three(backend: CpuBackend | ReferenceBackend, slot_mapping: torch.Tensor) -> None:
    reshape_and_cache(
        backend,
        SCENE.cache,
        torch.zeros(3, 2, 8),
        torch.zeros(3, 2, 4),
        slot_mapping,
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(3, dtype=torch.bool),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_slots_of_another_type(isa: str, dtype: torch.dtype) -> None:
    with pytest.raises(KernelError, match=r"contiguous one of torch\.int64"):
        write_three(CpuBackend(isa), torch.arange(3).to(dtype))


def test_scalar_is_always_there() -> None:
    assert available_isas()[-1] == "scalar"


def test_best_instruction_set_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    backend = CpuBackend.choose()
    assert backend.isa == ISAS[0]
    assert backend.reason == f"the best of {', '.join(ISAS)} on this processor"
    assert isinstance(select_backend(torch.device("cpu")), CpuBackend)


@pytest.mark.parametrize("isa", ISAS)
def test_environment_names_the_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    backend = CpuBackend.choose()
    assert backend.isa == isa
    assert backend.name == f"C++ {isa}"
    assert ISA_VARIABLE in backend.reason


@pytest.mark.parametrize("isa", ["sse9", "", "AVX2"])
def test_environment_names_an_unknown_one(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    with pytest.raises(KernelError) as error:
        CpuBackend.choose()
    message = str(error.value)
    assert repr(isa) in message
    assert all(known in message for known in ISAS)
    assert is_one_sentence(message)


def test_unknown_instruction_set() -> None:
    with pytest.raises(KernelError, match="'sse9' is not available: this build and") as error:
        CpuBackend("sse9")
    assert is_one_sentence(str(error.value))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("slot", [-1, 10**6])
def test_slots_outside_the_cache(isa: str, slot: int) -> None:
    before = SCENE.cache.blocks.clone()
    with pytest.raises(KernelError, match="slot_mapping"):
        write_three(CpuBackend(isa), torch.tensor([0, 1, slot]))
    assert torch.equal(SCENE.cache.blocks, before)


@pytest.mark.parametrize("isa", ISAS)
def test_queries_that_no_sequence_has(isa: str) -> None:
    with pytest.raises(KernelError, match="query_start_loc"):
        paged_attention(CpuBackend(isa), torch.zeros(4, 4, 8), SCENE.cache, SCENE.batch, PLAIN)


@pytest.mark.parametrize("isa", [ISAS[0], "reference"])
def test_no_queries(isa: str) -> None:
    batch = AttentionBatch(
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(0, 1, dtype=torch.int32),
    )
    out = paged_attention(backend_of(isa), torch.zeros(0, 4, 8), SCENE.cache, batch, PLAIN)
    assert out.shape == (0, 4, 4)


@pytest.mark.parametrize(
    ("seq_lens", "blocks", "words"),
    [
        ([20, 500], None, "more tokens than its blocks hold"),
        ([1, 5], None, "more queries than tokens"),
        (None, 10**6, "block outside the cache"),
        (None, -1, "block outside the cache"),
    ],
)
def test_batches_that_would_read_elsewhere(
    seq_lens: list[int] | None, blocks: int | None, words: str
) -> None:
    batch = SCENE.batch
    if seq_lens is not None:
        batch = replace(batch, seq_lens=torch.tensor(seq_lens, dtype=torch.int32))
    if blocks is not None:
        batch = replace(batch, block_table=torch.full_like(batch.block_table, blocks))
    with pytest.raises(KernelError, match=words) as error:
        paged_attention(CpuBackend(ISAS[0]), torch.zeros(3, 4, 8), SCENE.cache, batch, PLAIN)
    assert is_one_sentence(str(error.value))


def test_softmax_scale_of_nothing() -> None:
    with pytest.raises(KernelError, match="softmax_scale is 0"):
        AttentionParams(0.0)


def test_softcap_of_nothing() -> None:
    with pytest.raises(KernelError, match="softcap is 0"):
        AttentionParams(1.0, softcap=0.0)


def test_window_of_no_tokens() -> None:
    with pytest.raises(KernelError, match="sliding_window is 0"):
        AttentionParams(1.0, sliding_window=0)


def test_tensors_that_do_not_fit_the_layout() -> None:
    blocks, layout = SCENE.cache.blocks, SCENE.cache.layout
    with pytest.raises(KernelError, match="blocks has shape") as error:
        LayerCache(blocks[:, 1:], layout)
    assert is_one_sentence(str(error.value))
    with pytest.raises(KernelError, match="k_scale has shape"):
        LayerCache(blocks, layout, k_scale=torch.ones(1, 8))
    with pytest.raises(KernelError, match="v_scale has shape"):
        LayerCache(blocks, layout, v_scale=torch.ones(2, 8))


def test_layouts_without_a_kernel() -> None:
    layout = replace(SCENE.cache.layout, head_size=1025)
    with pytest.raises(KernelError, match="1 to 1024") as error:
        CpuBackend(ISAS[0]).check_layout(layout)
    assert "\n" not in str(error.value)


def test_no_kernels_for_other_devices() -> None:
    with pytest.raises(KernelError, match="no kernels for the device meta") as error:
        select_backend(torch.device("meta"))
    assert is_one_sentence(str(error.value))
