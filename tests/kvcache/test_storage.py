"""Writing and attending through the storage: layer groups, shared layers, counts, fingerprints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cache_cases import ISAS
from tightkv.errors import InsufficientMemoryError
from tightkv.formats import KVCacheScales, LayerScales, TensorScale, resolve_format
from tightkv.kernels import AttentionBatch, AttentionParams, paged_attention
from tightkv.kernels.cpu import CpuBackend
from tightkv.kernels.ops import ReferenceBackend
from tightkv.kvcache import AttentionMetadata, KVCacheSpec, KVCacheStorage, group_layers

NUM_BLOCKS = 6
HEADS, SIZE = 2, 32
CPU = torch.device("cpu")
PARAMS = AttentionParams(softmax_scale=SIZE**-0.5)


def make_spec(
    layer_idx: int, kv_cache_dtype: str, window: int | None, scale: TensorScale | None = None
) -> KVCacheSpec:
    layer_format = resolve_format(kv_cache_dtype, torch.float32, scale)
    return KVCacheSpec(
        layer_idx=layer_idx,
        block_size=16,
        num_kv_heads=HEADS,
        head_size=SIZE,
        value_size=SIZE,
        k_format=layer_format,
        v_format=layer_format,
        sliding_window=window,
    )


def make_storage(
    dtypes: Mapping[int, tuple[str, int | None]],
    scales: KVCacheScales | None = None,
    kv_sources: Mapping[int, int] | None = None,
) -> KVCacheStorage:
    specs = [
        make_spec(layer, dtype, window, (scales or {}).get(layer, LayerScales()).k)
        for layer, (dtype, window) in dtypes.items()
    ]
    backend = CpuBackend(ISAS[0])
    return KVCacheStorage(group_layers(specs), NUM_BLOCKS, CPU, backend, scales, kv_sources)


TABLES = ([3, 0], [1, 5])  # of the two groups


def metadata(num_tokens: int) -> AttentionMetadata:
    """One sequence whose tokens are all new, at other places in each group."""
    slots = [
        torch.tensor([table[t // 16] * 16 + t % 16 for t in range(num_tokens)]) for table in TABLES
    ]
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    lens = torch.tensor([num_tokens], dtype=torch.int32)
    return AttentionMetadata(
        batches=tuple(
            AttentionBatch(starts, lens, torch.tensor([table], dtype=torch.int32))
            for table in TABLES
        ),
        slot_mappings=tuple(slots),
        bad_tokens=torch.zeros(num_tokens, dtype=torch.bool),
    )


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(0, 1)


def test_two_groups_and_a_shared_layer() -> None:
    """Layer 2 reads what layer 1 stored, through the blocks of layer 1's group."""
    storage = make_storage({0: ("float32", None), 1: ("float32", 8)}, kv_sources={2: 1})
    step = metadata(20)
    generator = torch.Generator().manual_seed(0)
    q, k0, v0, k1, v1 = (torch.randn(20, HEADS, SIZE, generator=generator) for _ in range(5))
    storage.write(0, k0, v0, step)
    storage.write(1, k1, v1, step)
    before = storage.layer(1).blocks.clone()
    storage.write(2, torch.full_like(k1, 9.0), torch.full_like(v1, 9.0), step)
    assert torch.equal(storage.layer(1).blocks, before)
    assert storage.layer(2) is storage.layer(1)

    torch.testing.assert_close(storage.attend(0, q, step, PARAMS), full_attention(q, k0, v0))
    torch.testing.assert_close(storage.attend(1, q, step, PARAMS), full_attention(q, k1, v1))
    assert torch.equal(storage.attend(2, q, step, PARAMS), storage.attend(1, q, step, PARAMS))

    used = before.any(dim=1).nonzero().flatten().tolist()
    assert used == sorted(TABLES[0] + TABLES[1])
    assert storage.layer(0).blocks is storage.layer(1).blocks


def test_groups_keep_to_their_own_block_table() -> None:
    storage = make_storage({0: ("float32", None), 1: ("float32", 8)})
    step = metadata(20)
    x = torch.randn(20, HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    for layer in (0, 1):
        storage.write(layer, x + layer, x - layer, step)
    swapped = replace(step, batches=step.batches[::-1])
    right = storage.attend(1, x, step, PARAMS)
    assert not torch.equal(storage.attend(1, x, swapped, PARAMS), right)
    expected = paged_attention(ReferenceBackend(), x, storage.layer(1), step.batches[1], PARAMS)
    torch.testing.assert_close(right, expected)


MIXED: dict[int, tuple[str, int | None]] = {
    0: ("float16", 8),
    1: ("int8_per_token_head", None),
    2: ("float32", None),
    3: ("fp8_e5m2", 8),
    4: ("int8_per_token_head", None),
}


def test_layers_of_a_page_do_not_touch_each_other() -> None:
    """Each layer reads what it wrote, whatever the others of its page have written since."""
    storage, apart = make_storage(MIXED), {}
    step = metadata(20)
    batches = [step.batches[index % 2] for index in range(len(storage.groups))]
    slots = [step.slot_mappings[index % 2] for index in range(len(storage.groups))]
    step = replace(step, batches=tuple(batches), slot_mappings=tuple(slots))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(20, HEADS, SIZE, generator=generator)
    shared = [group for group in storage.groups if len(group.specs) > 1]
    assert shared
    for group in shared[:1]:
        for spec in group.specs:
            x = torch.randn(2, 20, HEADS, SIZE, generator=generator)
            storage.write(spec.layer_idx, x[0], x[1], step)
            alone = make_storage({spec.layer_idx: MIXED[spec.layer_idx]})
            index = storage.groups.index(group)
            own = replace(step, batches=(batches[index],), slot_mappings=(slots[index],))
            alone.write(spec.layer_idx, x[0], x[1], own)
            apart[spec.layer_idx] = alone.attend(spec.layer_idx, query, own, PARAMS)
    for layer, expected in apart.items():
        assert torch.equal(storage.attend(layer, query, step, PARAMS), expected)


def test_cleared_blocks_are_zeros() -> None:
    storage = make_storage(MIXED)
    storage.layer(0).blocks.fill_(0xFF)
    storage.clear([1, 4])
    zeros = [block for block in range(NUM_BLOCKS) if not storage.layer(0).blocks[block].any()]
    assert zeros == [1, 4]


def test_scales_reach_the_kernels() -> None:
    """Static scales per head: K and V of each head in the range of its own scale."""
    step = metadata(20)
    size = torch.tensor([1.0, 1000.0])
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(20, HEADS, SIZE, generator=generator) for _ in range(3))
    key, value, query = key * size[:, None], value * size[:, None], query / size[:, None]
    scale = TensorScale(size * 6 / 127)
    storage = make_storage({0: ("int8", None)}, {0: LayerScales(scale, scale)})
    storage.write(0, key, value, step)
    got = storage.attend(0, query, step, PARAMS) / size[:, None]
    expected = full_attention(query, key, value) / size[:, None]
    assert (got - expected).abs().max() < 0.06


def test_clip_counts_by_layer_and_bad_tokens() -> None:
    scales = {0: LayerScales(TensorScale(torch.tensor(0.01)), TensorScale(torch.tensor(1.0)))}
    storage = make_storage({0: ("int8", None), 1: ("float32", 8)}, scales)
    step = metadata(20)
    key, value = torch.zeros(20, HEADS, SIZE), torch.zeros(20, HEADS, SIZE)
    key[0, 0, 0], key[3, 1, 5], value[2, 0, 1] = 2.0, -2.0, 1e9
    value[7, 1, 0] = float("nan")
    for layer in (0, 1):
        storage.write(layer, key, value, step)
    assert storage.clip_counts() == {0: (2, 1), 1: (0, 0)}
    assert step.bad_tokens.nonzero().flatten().tolist() == [7]
    storage.write(0, key, value, step)
    assert storage.clip_counts()[0] == (4, 2)


ONES = TensorScale(torch.ones(()))


def layer_scales(k: TensorScale | None = ONES, v: TensorScale | None = ONES) -> LayerScales:
    return LayerScales(k, v)


def test_fingerprint_differs_with_formats_and_scales() -> None:
    def fingerprint(
        dtypes: Mapping[int, tuple[str, int | None]], scales: KVCacheScales | None = None
    ) -> bytes:
        return make_storage(dtypes, scales).fingerprint()

    two = TensorScale(torch.tensor(2.0))
    per_head = TensorScale(torch.ones(HEADS))
    dynamic = TensorScale(torch.ones(()), dynamic=True)
    int8: dict[int, tuple[str, int | None]] = {0: ("int8", None)}
    fingerprints = [
        fingerprint({0: ("float32", None)}),
        fingerprint({0: ("float16", None)}),
        fingerprint({0: ("int8_per_token_head", None)}),
        fingerprint({0: ("fp8", None)}),
        fingerprint({0: ("fp8_e5m2", None)}),
        fingerprint({1: ("float32", None)}),
        fingerprint({0: ("float32", None), 1: ("float32", None)}),
        fingerprint(int8, {0: layer_scales()}),
        fingerprint(int8, {0: layer_scales(k=two)}),
        fingerprint(int8, {0: layer_scales(v=two)}),
        fingerprint(int8, {0: layer_scales(k=per_head, v=per_head)}),
        fingerprint(int8, {0: layer_scales(k=dynamic, v=dynamic)}),
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert fingerprint(int8, {0: layer_scales()}) == fingerprints[7]


def test_too_much_memory() -> None:
    groups = group_layers([make_spec(4, "float32", None)])
    with pytest.raises(InsufficientMemoryError, match="layer 4 needs") as error:
        KVCacheStorage(groups, 2**44, CPU, ReferenceBackend())
    assert "--kv-cache-dtype" in str(error.value)


def test_blocks_start_as_zeros() -> None:
    storage = make_storage({0: ("fp8_e4m3", None)})
    assert not storage.layer(0).blocks.any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_block_takes_no_memory_until_it_is_written() -> None:
    spec = make_spec(0, "int8", None)
    num_blocks = (1 << 30) // spec.block_bytes
    before = resident_bytes()
    storage = KVCacheStorage(group_layers([spec]), num_blocks, CPU, ReferenceBackend())
    assert storage.num_bytes > 1_000_000_000
    assert resident_bytes() - before < 100_000_000
    assert storage.layer(0).blocks.data_ptr() % 64 == 0
    assert not storage.layer(0).blocks[::100_000].any()
