"""Attention in Triton: near the reference, and a row's bits do not depend on its batch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from attention_cases import (
    FORMATS,
    assert_every_argument_matters,
    assert_only_its_row_is_spoiled,
    assert_order_and_garbage_do_not_matter,
    assert_rows_are_the_same_alone,
    codes_as_v,
    error_of_codes_as_k,
    in_chunks,
    params_for,
    poisoned,
)
from attention_cases import assert_near_reference as assert_all_near_reference
from attention_cases import attend as attend_with
from cache_cases import (
    NAN_BYTE,
    Scene,
    finite_codes,
    in_pages,
    make_batch,
    make_scene,
    new_cache,
    tensor_format,
    without_passed_blocks,
    write,
)
from tightkv.formats import BlockLayout, CodeType, TensorFormat, resolve_format
from tightkv.formats.base import CODE_TYPES
from tightkv.formats.registry import KV_CACHE_DTYPES, takes_scales
from tightkv.formats.scales import TensorScale
from tightkv.kernels import AttentionBatch, AttentionParams
from tightkv.kernels.ops import ReferenceBackend
from tightkv.kernels.reference import read_sequence
from triton_cases import DEVICE, moved_cache, triton_backend

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tightkv[triton]'")

# numpy, which the interpreter computes with, warns where what no row sees overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# One of each kind of arithmetic.
KINDS = ["bfloat16", "int8+channel+dynamic", "fp8_e4m3+channel+dynamic"]
UNLIKE = list(itertools.permutations([*KINDS, "float32"], 2))
INF, NAN = float("inf"), float("nan")
# Two partitions of keys, one that just fits, a prompt, a chunk of a prompt, one token.
LENGTHS = ((1, 257), (1, 256), (5, 40), (30, 30), (1, 1))


def attend(
    scene: Scene,
    params: AttentionParams,
    query: torch.Tensor | None = None,
    batch: AttentionBatch | None = None,
) -> torch.Tensor:
    return attend_with(triton_backend(), scene, params, query, batch)


def assert_near_reference(scene: Scene, **changes: object) -> None:
    assert_all_near_reference([triton_backend()], scene, **changes)


# ---- against the reference ----


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str) -> None:
    assert_near_reference(make_scene(k=name, v=name, lengths=LENGTHS, value_size=48))


def formats_of_the_registry() -> dict[str, TensorFormat]:
    """What each `kv_cache_dtype` becomes, without scales and with each kind of them."""
    scales: list[TensorScale | None] = [None]
    scales += [
        TensorScale(torch.ones(shape), dynamic=dynamic)
        for shape in ((), (2,), (2, 32))
        for dynamic in (False, True)
    ]
    found = {}
    for dtype, scale in itertools.product(KV_CACHE_DTYPES, scales):
        if scale is None or takes_scales(dtype):
            made = resolve_format(dtype, torch.float16, scale)
            found[f"{made.code.name} {made.static} {made.dynamic}"] = made
    return found


@pytest.mark.parametrize("made", formats_of_the_registry().values(), ids=formats_of_the_registry())
def test_every_format_of_the_registry(made: TensorFormat) -> None:
    """Written and read by the kernels."""
    layout = BlockLayout(made, made, 2, 32, 32, 16)
    cache = new_cache(layout, 3)
    batch = make_batch([1, 2], [20, 7], torch.tensor([[2, 0], [1, 0]]).int())
    slots = torch.tensor([*range(32, 48), *range(4), *range(16, 23)])
    key, value = torch.randn(2, len(slots), 2, 32)
    on_device = moved_cache(cache)
    write(triton_backend(), on_device, key, value, slots)
    write(ReferenceBackend(), cache, key, value, slots)
    assert torch.equal(on_device.blocks.cpu(), cache.blocks)
    assert_near_reference(Scene(cache, torch.randn(3, 4, 32), batch))


@pytest.mark.slow
@pytest.mark.parametrize(("k", "v"), UNLIKE)
def test_unlike_formats(k: str, v: str) -> None:
    lengths = ((1, 300), (3, 20))
    assert_near_reference(make_scene(k=k, v=v, lengths=lengths, num_kv_heads=1, head_size=32))


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [64, 80, 96, 112, 128, 192, 256, 33, 1])
def test_head_sizes(head_size: int) -> None:
    for name, value_size in zip(KINDS, (head_size, 40, 256), strict=True):
        scene = make_scene(
            k=name,
            v=name,
            lengths=((1, 270), (20, 20)),
            num_kv_heads=1,
            head_size=head_size,
            value_size=value_size,
        )
        assert_near_reference(scene)


@pytest.mark.parametrize(
    "group", [1, 7, *(pytest.param(group, marks=pytest.mark.slow) for group in (3, 8, 16, 32, 71))]
)
def test_groups(group: int) -> None:
    scene = make_scene(
        k="int8+channel+dynamic",
        v="fp8_e4m3+channel+dynamic",
        lengths=((1, 260), (9, 33)),
        group=group,
        head_size=32,
    )
    assert_near_reference(scene)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [32, 48])
def test_block_sizes(block_size: int) -> None:
    for name in KINDS:
        lengths = ((1, block_size + 1), (9, 100), (1, 260))
        assert_near_reference(make_scene(k=name, v=name, lengths=lengths, block_size=block_size))


@pytest.mark.parametrize("name", KINDS)
def test_lengths_of_decodes(name: str) -> None:
    lengths = [(1, n) for n in (2, 15, 16, 17, 255, 512, 513)]
    assert_near_reference(make_scene(k=name, v=name, lengths=lengths, num_kv_heads=1))


@pytest.mark.parametrize("name", KINDS)
def test_ragged_batch(name: str) -> None:
    """Decodes, a whole prompt, chunks of prompts, and sequences without queries."""
    lengths = ((0, 33), (1, 513), (16, 16), (40, 300), (0, 5), (7, 600), (1, 16))
    assert_near_reference(make_scene(k=name, v=name, lengths=lengths, head_size=32))


@pytest.mark.parametrize("window", [None, 1, 20, 300])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
def test_window_softcap_and_sinks(window: int | None, softcap: float | None) -> None:
    with_sinks = (window is None) == (softcap == 2.0)
    name = KINDS[1 + with_sinks]
    lengths = ((1, 1), (9, 340), (1, 600))
    scene = make_scene(k=name, v=name, lengths=lengths, num_kv_heads=1, group=4, head_size=32)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0]) if with_sinks else None
    assert_near_reference(scene, sliding_window=window, softcap=softcap, sinks=sinks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "int8+dynamic", "fp8_e5m2+channel"])
def test_narrow_and_strided_queries(dtype: torch.dtype, name: str) -> None:
    """`[heads, tokens, size]` transposed; fewer terms carry them, which must lose nothing."""
    scene = make_scene(k=name, v="float16", lengths=((6, 90), (1, 280)), head_size=32)
    query = scene.query.to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
    assert not query.is_contiguous()
    assert_near_reference(replace(scene, query=query))


@pytest.mark.parametrize("code", CODE_TYPES.values(), ids=lambda code: code.name)
def test_every_code_of_v_is_read_exactly(code: CodeType) -> None:
    """Subnormals and zeros too."""
    codes = finite_codes(code)
    codes = codes[:: max(1, len(codes) // 2048)]
    # On a GPU, products of float32 keep 22 bits.
    tolerance = 2.0**-21 if code.name == "float32" and DEVICE.type == "cuda" else 0.0
    error = (codes_as_v(triton_backend(), codes, code) - codes.float()).abs()
    assert (error <= tolerance * codes.float().abs()).all()


@pytest.mark.parametrize("code", CODE_TYPES.values(), ids=lambda code: code.name)
def test_every_code_of_k_is_read_right(code: CodeType) -> None:
    codes = finite_codes(code)
    codes = codes[:: max(1, len(codes) // 256)]
    assert error_of_codes_as_k(triton_backend(), codes, code, smallest=2.0**-90) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e-5])
def test_tiny_queries_weigh_all_keys_alike(name: str, size: float) -> None:
    scene = make_scene(k=name, v=name, lengths=((3, 260),), num_kv_heads=1)
    assert_near_reference(replace(scene, query=scene.query * size))


@pytest.mark.parametrize("name", KINDS)
def test_large_logits_choose_one_key(name: str) -> None:
    """The query lies along one key: that weighs nearly 1, and most of the others underflow."""
    scene = make_scene(k=name, v=name, lengths=((1, 300),), num_kv_heads=1, group=1)
    keys, _ = read_sequence(scene.cache, scene.batch.block_table[0], 300)
    assert_near_reference(replace(scene, query=10 * keys[77:78]))
    assert attend(scene, params_for(scene), scene.query * 1e6).isfinite().all()


# ---- a row's bits do not depend on what else there is ----


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("float32", "bfloat16"),
        ("int8+channel+dynamic", "int8+channel+dynamic"),
        ("fp8_e4m3+dynamic", "fp8_e5m2"),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"sliding_window": 40}, marks=pytest.mark.slow),
        {"sliding_window": 300, "softcap": 5.0, "sinks": torch.tensor([0.0, 1.0, -1.0])},
    ],
    ids=["plain", "window", "all"],
)
def test_row_alone_is_the_row_in_any_batch(k: str, v: str, changes: dict[str, object]) -> None:
    """Also: decode of token t is row t of the prefill."""
    lengths = ((1, 257), (6, 6), (3, 514), (3, 257))
    scene = make_scene(
        k=k, v=v, lengths=lengths, num_kv_heads=1, group=3, head_size=32, value_size=40
    )
    params = params_for(scene, **changes)
    assert_rows_are_the_same_alone(triton_backend(), scene, params, [3, 0, 1])


@pytest.mark.parametrize("group", [1, 3, pytest.param(32, marks=pytest.mark.slow)])
def test_prompt_in_chunks_is_the_prompt_whole(group: int) -> None:
    name = "int8+channel+dynamic"
    scene = make_scene(
        k=name, v=name, lengths=((270, 270),), num_kv_heads=1, group=group, head_size=16
    )
    params = params_for(scene)
    scene = replace(scene, query=scene.query[-20:])
    whole = attend(scene, params, batch=make_batch([20], [270], scene.batch.block_table))
    assert torch.equal(whole, in_chunks(triton_backend(), scene, params, [250, 257, 258, 270]))


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_scratch_memory_does_not_matter(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose partial sums exceed it is taken in pieces."""
    from tightkv.kernels.triton import backend

    scene = make_scene(k="float16", v="float16", lengths=[(1, 270)] * 5, num_kv_heads=1, group=1)
    params = params_for(scene)
    whole = attend(scene, params)
    one_sequence = 2 * (64 + 2) * 4
    monkeypatch.setattr(backend, "_SCRATCH_BYTES", one_sequence * -(-5 // pieces))
    assert torch.equal(attend(scene, params), whole)


def test_the_hosts_knowledge_changes_nothing() -> None:
    scene = make_scene(k="float16", v="float16", lengths=[(1, 270), (1, 3)], num_kv_heads=1)
    params = params_for(scene)
    batch = replace(scene.batch, max_query_len=1)
    assert torch.equal(attend(scene, params, batch=batch), attend(scene, params))


# ---- what lies behind the last token, and what is not finite ----


@pytest.mark.parametrize("name", FORMATS)
def test_block_order_and_garbage_do_not_matter(name: str) -> None:
    assert_order_and_garbage_do_not_matter(
        triton_backend(),
        k=name,
        v=name,
        lengths=((1, 1), (3, 21), (1, 260)),
        num_kv_heads=1,
        block_size=64 if "dynamic" in name else 16,
        head_size=32,
    )


@pytest.mark.parametrize("name", FORMATS)
def test_nan_behind_the_last_token_does_not_matter(name: str) -> None:
    lengths = ((1, 1), (3, 21), (1, 260))
    scene = make_scene(k=name, v=name, lengths=lengths, num_kv_heads=1, head_size=32)
    params = params_for(scene)
    assert torch.equal(attend(poisoned(scene), params), attend(scene, params))


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_before_the_window_do_not_matter(name: str) -> None:
    scene = make_scene(
        k=name, v=name, lengths=((1, 17), (3, 21), (1, 260)), num_kv_heads=1, head_size=32
    )
    params = params_for(scene, sliding_window=3)
    passed = without_passed_blocks(scene, 3)
    assert torch.equal(attend(passed, params), attend(scene, params))


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_in_pages(name: str) -> None:
    """What lies between the blocks of a layer does not matter."""
    scene = make_scene(k=name, v=name, lengths=((1, 17), (3, 40)), num_kv_heads=1, head_size=32)
    paged = replace(scene, cache=in_pages(scene.cache))
    assert torch.equal(attend(paged, params_for(scene)), attend(scene, params_for(scene)))


@pytest.mark.parametrize("name", KINDS)
def test_layers_in_one_pool_of_pages(name: str) -> None:
    """Two layers of unlike formats, each written and read through its own layout."""
    first = BlockLayout(tensor_format(name), tensor_format("int8+dynamic"), 2, 32, 32, 16)
    second = replace(first, k_format=first.v_format, v_format=first.k_format)
    page_bytes = first.block_bytes + second.block_bytes
    layers = [
        new_cache(replace(first, page_bytes=page_bytes), 5),
        new_cache(replace(second, page_bytes=page_bytes, k_offset=first.block_bytes), 5),
    ]
    pages = torch.full_like(layers[0].blocks, NAN_BYTE)
    on_device = pages.clone().to(DEVICE)
    slots = torch.tensor([37, 16, 17, *range(48, 61), 2, 3])
    for seed, layer in enumerate(layers):
        torch.manual_seed(seed)
        key, value = torch.randn(2, len(slots), 2, 32)
        write(ReferenceBackend(), replace(layer, blocks=pages), key, value, slots)
        moved = replace(moved_cache(layer), blocks=on_device)
        write(triton_backend(), moved, key, value, slots)
    assert torch.equal(on_device.cpu(), pages)
    batch = make_batch([1], [13], torch.tensor([[3]], dtype=torch.int32))
    for layer in layers:
        cache = replace(layer, blocks=pages)
        assert_near_reference(Scene(cache, torch.randn(1, 2, 32), batch))


@pytest.mark.parametrize("name", ["float16", "int8+channel+dynamic", "fp8_e4m3+dynamic"])
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 20, "sinks": torch.zeros(2)}])
def test_padding_rows_and_a_wide_table(name: str, changes: dict[str, object]) -> None:
    """As in a captured decode: rows of no tokens, and a table that the longest sequence fills.

    What the table says behind a sequence's last block is not looked at.
    """
    scene = make_scene(k=name, v=name, lengths=((1, 270), (1, 5)), num_kv_heads=1, head_size=32)
    params = params_for(scene, **changes)
    table = torch.full((4, 40), 2**30, dtype=torch.int32)
    for row, seq_len in enumerate((270, 5)):
        used = -(-seq_len // 16)
        table[row, :used] = scene.batch.block_table[row, :used]
    padded = make_batch([1] * 4, [270, 5, 0, 0], table)
    query = torch.cat([scene.query, torch.full_like(scene.query, NAN)])
    expected = attend(scene, params)
    for batch in (padded, replace(padded, max_query_len=1)):
        got = attend(scene, params, query, batch)
        assert torch.equal(got[:2], expected)
    query[2:] = 1.0
    got = attend(scene, params, query, padded)
    assert torch.equal(got, torch.cat([expected, torch.zeros_like(expected)]))
    narrow = make_batch([1, 1], [5, 0], table[1:3, :1].contiguous())
    got = attend(scene, params, query[1:3], narrow)
    assert torch.equal(got, torch.cat([expected[1:], torch.zeros_like(expected[1:])]))


@pytest.mark.parametrize("name", ["float32", "int8+channel+dynamic", "fp8_e4m3+head"])
@pytest.mark.parametrize(("bad", "token"), [(NAN, 0), (INF, 8), (NAN, 9), (INF, 10)])
def test_query_that_is_not_finite_spoils_its_row_only(name: str, bad: float, token: int) -> None:
    lengths = ((9, 20), (1, 270), (1, 5))
    scene = make_scene(k=name, v=name, lengths=lengths, num_kv_heads=1, group=3, head_size=32)
    assert_only_its_row_is_spoiled(triton_backend(), scene, bad, token)


# ---- the tests above can fail ----


@pytest.mark.parametrize("name", KINDS)
def test_every_argument_matters(name: str) -> None:
    scene = make_scene(k=name, v=name, lengths=((1, 300), (4, 200)), num_kv_heads=1, group=2)
    assert_every_argument_matters(triton_backend(), scene)
