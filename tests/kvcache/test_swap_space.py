"""Slots and their bytes: what goes out comes back, or an error says that it does not."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cache_cases import tensor_format
from tightkv.errors import ConfigError, SwapError
from tightkv.kernels.ops import ReferenceBackend
from tightkv.kvcache import KVCacheSpec, KVCacheStorage, group_layers
from tightkv.kvcache import swap_memory as swap_memory_module
from tightkv.kvcache import swap_space as swap_space_module
from tightkv.kvcache.swap_costs import SwapCosts
from tightkv.kvcache.swap_memory import GIB, PinnedMemory, SwapFile, open_swap_memory
from tightkv.kvcache.swap_space import SwapSpace
from tightkv.metrics import EngineStats

BLOCK_SIZE = 16
NUM_BLOCKS = 16
CPU = torch.device("cpu")


def new_storage() -> KVCacheStorage:
    """Layers in two groups."""
    specs = [
        KVCacheSpec(
            layer_idx=layer,
            block_size=BLOCK_SIZE,
            num_kv_heads=heads,
            head_size=16,
            value_size=16,
            k_format=tensor_format("int8+dynamic"),
            v_format=tensor_format("float16"),
            sliding_window=window,
        )
        for layer, (heads, window) in enumerate(zip((2, 1, 3), (None, 8, None), strict=True))
    ]
    return KVCacheStorage(group_layers(specs), NUM_BLOCKS, CPU, ReferenceBackend())


def new_space(
    folder: Path, num_slots: int, storage: KVCacheStorage, stats: EngineStats | None = None
) -> SwapSpace:
    memory = SwapFile(folder, num_slots * storage.groups[0].page_bytes)
    return SwapSpace(memory, storage, SwapCosts(), stats or EngineStats())


def fill(storage: KVCacheStorage) -> list[torch.Tensor]:
    """Random bytes in all blocks; a copy of them."""
    for blocks in storage.tensors():
        blocks.random_(0, 255, generator=torch.Generator().manual_seed(0))
    return [blocks.clone() for blocks in storage.tensors()]


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    return text


@pytest.mark.parametrize("piece_bytes", [1, 3 * 2**13, 2**24])
def test_bytes_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(swap_space_module, "_PIECE_BYTES", piece_bytes)
    storage, stats = new_storage(), EngineStats()
    space = new_space(tmp_path, 12, storage, stats)
    for blocks in ([5, 1, 2, 7], [0, 3, 4]):
        before = fill(storage)
        slots = space.store(blocks, [None] * len(blocks))
        assert slots is not None
        into = [6, 4, 1, 0][: len(blocks)]
        for tensor in storage.tensors():
            tensor.zero_()
        space.load(slots, into)
        for now, old in zip(storage.tensors(), before, strict=True):
            assert torch.equal(now[into], old[blocks])
            assert not now[[block for block in range(NUM_BLOCKS) if block not in into]].any()
    assert (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (7, 7)
    assert space.num_used_slots == 7


def test_bytes_come_back_from_memory() -> None:
    """As for a device that is none of the processor, but not pinned: nothing here pins memory."""
    storage, stats = new_storage(), EngineStats()
    memory = PinnedMemory(4 * storage.groups[0].page_bytes, pin_memory=False)
    space = SwapSpace(memory, storage, SwapCosts(), stats)
    before = fill(storage)
    slots = space.store([5, 1, 7], [None] * 3)
    assert slots is not None
    for tensor in storage.tensors():
        tensor.zero_()
    space.load(slots[1:], [2, 3])
    for now, old in zip(storage.tensors(), before, strict=True):
        assert torch.equal(now[[2, 3]], old[[1, 7]])
        assert not now[[0, 1, *range(4, NUM_BLOCKS)]].any()
    assert (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (3, 2)
    with pytest.raises(ConfigError, match=r"could not be had as pinned memory: lower it\.$"):
        PinnedMemory(1 << 60, pin_memory=False)


def test_slots_are_few_and_sequences_come_first(tmp_path: Path) -> None:
    space = new_space(tmp_path, 4, new_storage())
    names = [bytes([number]) for number in range(9)]
    space.keep([(2, names[2]), (1, names[1]), (0, names[0])])
    assert space.num_kept_slots == 3
    space.keep([(0, b"other")])
    assert space.find(names[0]) != space.find(b"other") is not None
    # The end of the first prompt goes first.
    held = space.store([4], [None])
    assert space.find(names[2]) is None
    assert space.find(names[1]) is not None
    # What is here already takes no other slot.
    again = space.store([1, 5], [names[1], None])
    assert held is not None
    assert again is not None
    assert again[0] == space.find(names[1])
    assert space.find(names[0]) is None
    assert space.store([6, 7], [None, None]) is None
    assert (space.num_used_slots, space.num_kept_slots) == (3, 1)
    space.check_integrity([held, again])
    with pytest.raises(AssertionError, match="leaks"):
        space.check_integrity([held])
    space.release(held)
    space.release(again)
    assert (space.num_used_slots, space.num_kept_slots) == (0, 2)
    space.keep([(block, names[block]) for block in reversed(range(7))])
    assert [space.find(name) is not None for name in names] == [True] * 4 + [False] * 5
    space.forget_all()
    assert (space.num_used_slots, space.num_kept_slots) == (0, 0)


def test_a_dear_copy_is_not_kept(tmp_path: Path) -> None:
    space = new_space(tmp_path, 4, new_storage())
    assert space.costs.copy_out.per_second
    assert space.costs.copy_in.per_second
    space.costs.prefill.note(10**12, 1)
    space.keep([(0, b"name")])
    assert space.num_kept_slots == 0
    space.costs.ignores_costs = True
    space.keep([(0, b"name")])
    assert space.num_kept_slots == 1


def test_costs_follow_what_is_measured() -> None:
    costs = SwapCosts()
    assert costs.prefers_swap(10**12, 10**12, 1)
    costs.copy_out.note(1000, 1)
    costs.copy_in.note(500, 1)
    costs.prefill.note(10, 1)
    assert costs.seconds_to_swap(2000, 2000) == pytest.approx(6)
    assert costs.seconds_to_compute(50) == pytest.approx(5)
    assert not costs.prefers_swap(2000, 2000, 50)
    assert costs.prefers_swap(2000, 2000, 70)
    for _ in range(100):
        costs.copy_in.note(5000, 1)
    assert costs.copy_in.per_second == pytest.approx(5000, rel=0.01)


def test_a_file_without_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    memory = SwapFile(folder, 8 << 20)
    assert list(folder.iterdir()) == []
    assert os.fstat(memory._descriptor).st_blocks * 512 >= 8 << 20, "the bytes are not reserved"
    rows = torch.arange(40, dtype=torch.uint8).view(4, 10)
    memory.write(3, rows)
    back = torch.zeros_like(rows)
    memory.read(3, back)
    assert torch.equal(rows, back)
    memory.close()
    with pytest.raises(SwapError, match="cannot be written"):
        memory.write(0, rows)


@pytest.mark.parametrize("damage", ["changed", "shorter"])
def test_a_disk_that_loses_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    space = new_space(tmp_path, 4, new_storage())
    space.keep([(0, b"a"), (1, b"b")])
    slots = [space.find(b"a"), space.find(b"b")]
    held = [slot for slot in slots if slot is not None]
    memory = space._memory
    assert isinstance(memory, SwapFile)
    if damage == "changed":
        os.pwrite(memory._descriptor, b"?", held[1] * space.slot_bytes + 5)
    else:
        os.truncate(memory._descriptor, space.slot_bytes // 2)
    for _ in range(2):
        with pytest.raises(SwapError):
            space.load(held, [2, 3])
    assert len(caplog.records) == 1
    assert space.find(b"a") is space.find(b"b") is None


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_does_not_give_what_it_has(tmp_path: Path) -> None:
    with largest_file(1 << 20), pytest.raises(ConfigError, match="cannot give it") as caught:
        SwapFile(tmp_path, 2 << 20)
    assert "File too large" in one_sentence(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_cannot_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    memory = SwapFile(tmp_path, (3 << 20) + 5)
    assert os.fstat(memory._descriptor).st_size == (3 << 20) + 5
    with largest_file(1 << 20), pytest.raises(ConfigError, match="cannot give it"):
        SwapFile(tmp_path, 2 << 20)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder, words in (
        (file, "is no folder"),
        (tmp_path / "absent" / "swap", "No such file or directory"),
        (Path("/proc/self"), "swap_dir /proc/self"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            SwapFile(folder, 1 << 20)
        one_sentence(caught.value)


def test_absurd_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="GiB free") as caught:
        open_swap_memory(10**9 * GIB, str(tmp_path), CPU, None)
    one_sentence(caught.value)
    with pytest.raises(ConfigError, match="less than a block's"):
        SwapSpace(SwapFile(tmp_path, 100), new_storage(), SwapCosts(), EngineStats())
    monkeypatch.setattr(swap_memory_module, "_is_memory", lambda _: True)
    with pytest.raises(ConfigError, match=r"2 GiB of memory.*tmpfs.*1\.00 GiB are available"):
        open_swap_memory(2 * GIB, str(tmp_path), CPU, GIB)


def test_what_is_memory(tmp_path: Path) -> None:
    if not Path("/proc/self/mountinfo").exists():
        pytest.skip("no /proc")
    assert not swap_memory_module._is_memory(Path("/proc"))
    shared = Path("/dev/shm")
    if os.statvfs(shared).f_fsid != os.statvfs("/").f_fsid:
        assert swap_memory_module._is_memory(shared)
        assert swap_memory_module._is_memory(shared / "absent")
