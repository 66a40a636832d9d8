"""Attention over the paged cache: every instruction set against the reference, and invariance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from attention_cases import (
    FORMATS,
    assert_every_argument_matters,
    assert_near_reference,
    assert_only_its_row_is_spoiled,
    assert_order_and_garbage_do_not_matter,
    assert_rows_are_the_same_alone,
    attend,
    codes_as_v,
    error_of_codes_as_k,
    in_chunks,
    params_for,
)
from cache_cases import (
    ISAS,
    finite_codes,
    in_pages,
    make_scene,
    without_passed_blocks,
    write,
)
from tightkv.formats import CodeType
from tightkv.formats.base import CODE_TYPES
from tightkv.kernels import Backend, paged_attention
from tightkv.kernels.cpu import CpuBackend
from tightkv.kernels.ops import ReferenceBackend
from tightkv.kernels.reference import read_sequence

# One of each kind of arithmetic.
KINDS = ["float16", "int8+channel+dynamic", "int8+channel", "fp8_e4m3+channel+dynamic"]
NAN = float("nan")


@pytest.fixture(params=ISAS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return ReferenceBackend() if request.param == "reference" else CpuBackend(request.param)


def backends() -> list[Backend]:
    return [CpuBackend(isa) for isa in ISAS]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- against the reference ----


@pytest.mark.parametrize("k", FORMATS)
def test_every_pair_of_formats(k: str) -> None:
    for v in FORMATS:
        lengths = ((1, 17), (5, 40), (1, 300), (30, 30))
        assert_near_reference(backends(), make_scene(k=k, v=v, lengths=lengths, value_size=48))


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256, 33, 72, 1, 576])
def test_head_sizes(head_size: int) -> None:
    for name, value_size in itertools.product(KINDS, (head_size, 40)):
        scene = make_scene(
            k=name,
            v=name,
            lengths=((1, 50), (20, 20)),
            num_kv_heads=1,
            head_size=head_size,
            value_size=value_size,
        )
        assert_near_reference(backends(), scene)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 64])
def test_groups(group: int) -> None:
    for name in KINDS:
        scene = make_scene(
            k=name, v=name, lengths=((1, 70), (9, 33), (50, 60)), group=group, head_size=32
        )
        assert_near_reference(backends(), scene)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_sizes(block_size: int) -> None:
    for name in KINDS:
        lengths = ((1, 1), (1, block_size), (1, block_size + 1), (70, 300), (1, 555))
        assert_near_reference(
            backends(), make_scene(k=name, v=name, lengths=lengths, block_size=block_size)
        )


LENGTHS = [1, 2, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1000]


@pytest.mark.parametrize("name", FORMATS)
def test_lengths_of_decodes(name: str) -> None:
    assert_near_reference(backends(), make_scene(k=name, v=name, lengths=[(1, n) for n in LENGTHS]))


@pytest.mark.parametrize("name", KINDS)
def test_ragged_batch(name: str) -> None:
    """Decodes, whole prompts, chunks in the middle of a prompt, and a sequence without queries."""
    lengths = ((1, 513), (16, 16), (1, 1), (40, 300), (0, 33), (255, 257), (7, 1000), (1, 16))
    assert_near_reference(backends(), make_scene(k=name, v=name, lengths=lengths, head_size=32))


@pytest.mark.parametrize("window", [None, 1, 7, 16, 300])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_window_softcap_and_sinks(
    window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    for name in KINDS:
        lengths = ((1, 1), (1, 17), (60, 340), (1, 700), (24, 24))
        scene = make_scene(k=name, v=name, lengths=lengths, head_size=32)
        sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0]) if with_sinks else None
        assert_near_reference(
            backends(), scene, sliding_window=window, softcap=softcap, sinks=sinks
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_and_strided_queries(dtype: torch.dtype) -> None:
    """`[heads, tokens, size]` transposed, as a model hands it over."""
    scene = make_scene(k="int8+channel+dynamic", v="float16", lengths=((30, 90),))
    query = scene.query.to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
    assert not query.is_contiguous()
    params = params_for(scene)
    for backend in backends():
        packed = attend(backend, scene, params, query.contiguous().float())
        assert torch.equal(attend(backend, scene, params, query), packed)
    assert_near_reference(backends(), replace(scene, query=query))


@pytest.mark.parametrize("code", CODE_TYPES.values(), ids=lambda code: code.name)
def test_every_code_of_v_is_read_exactly(backend: Backend, code: CodeType) -> None:
    """Subnormals and zeros too."""
    codes = finite_codes(code)
    # Integer weights have 16 bits: 1 is 32,767 steps of 1/32,767, which rounds once or twice.
    tolerance = 2.0**-22 if code.name == "int8" else 0.0
    error = (codes_as_v(backend, codes, code) - codes.float()).abs()
    assert (error <= tolerance * codes.float().abs()).all()


@pytest.mark.parametrize("code", CODE_TYPES.values(), ids=lambda code: code.name)
def test_every_code_of_k_is_read_right(backend: Backend, code: CodeType) -> None:
    codes = finite_codes(code)
    codes = codes[:: max(1, len(codes) // 1536)]
    error = error_of_codes_as_k(backend, codes, code, smallest=2.0**-120)
    assert error <= (2e-5 if code.name == "int8" else 1e-6)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e-5])
def test_tiny_queries_weigh_all_keys_alike(name: str, size: float) -> None:
    scene = make_scene(k=name, v=name, lengths=((3, 300),))
    assert_near_reference(backends(), replace(scene, query=scene.query * size))


@pytest.mark.parametrize("name", KINDS)
def test_large_logits_choose_one_key(name: str) -> None:
    """The query lies along one key: that weighs nearly 1, and most of the others underflow."""
    scene = make_scene(k=name, v=name, lengths=((1, 300),), num_kv_heads=1, group=1)
    keys, _ = read_sequence(scene.cache, scene.batch.block_table[0], 300)
    assert_near_reference(backends(), replace(scene, query=10 * keys[77:78]))
    for backend in backends():
        assert attend(backend, scene, params_for(scene), scene.query * 1e6).isfinite().all()


# ---- a row's bits do not depend on what else there is ----


INVARIANCE = [
    {},
    {"sliding_window": 40},
    {"sliding_window": 300, "softcap": 5.0, "sinks": torch.tensor([0.0, 1.0, -1.0, 3.0])},
]


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("float32", "float32"),
        ("bfloat16", "fp8_e5m2"),
        ("int8+channel+dynamic", "int8+channel+dynamic"),
        ("int8+tensor", "int8+tensor"),
        ("fp8_e4m3+dynamic", "int8+dynamic"),
    ],
)
@pytest.mark.parametrize("changes", INVARIANCE, ids=["plain", "window", "all"])
def test_row_alone_is_the_row_in_any_batch(
    backend: Backend, k: str, v: str, changes: dict[str, object]
) -> None:
    """Also: decode of token t is row t of the prefill."""
    lengths = ((1, 257), (60, 60), (1, 1), (33, 700), (1, 1000), (5, 514))
    scene = make_scene(k=k, v=v, lengths=lengths, head_size=32)
    assert_rows_are_the_same_alone(backend, scene, params_for(scene, **changes), [3, 0, 5, 2])


@pytest.mark.parametrize("name", ["float16", "int8+channel+dynamic", "fp8_e4m3+dynamic"])
@pytest.mark.parametrize("group", [1, 3, 8, 64])
def test_prompt_in_chunks_is_the_prompt_whole(backend: Backend, name: str, group: int) -> None:
    scene = make_scene(
        k=name, v=name, lengths=((290, 290),), num_kv_heads=1, group=group, head_size=32
    )
    params = params_for(scene)
    whole = attend(backend, scene, params)
    assert torch.equal(whole, in_chunks(backend, scene, params, [*range(0, 290, 7), 290]))


@pytest.mark.parametrize("name", ["float32", "int8+channel+dynamic"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("window", [None, 300])
def test_thread_counts(backend: Backend, name: str, block_size: int, window: int | None) -> None:
    """The more threads, the more pieces: of fewer chunks, in the end of a single head."""
    lengths = ((1, 1000), (100, 400), (1, 20), (1, 513))
    # Of float32 four heads are read together, and the fifth alone.
    scene = make_scene(k=name, v=name, lengths=lengths, num_kv_heads=5, block_size=block_size)
    params = params_for(scene, sliding_window=window)
    results = []
    for count in (1, 2, 3, 8):
        with threads(count):
            results.append(attend(backend, scene, params))
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_block_order_and_garbage_do_not_matter(
    backend: Backend, name: str, block_size: int
) -> None:
    assert_order_and_garbage_do_not_matter(
        backend,
        k=name,
        v=name,
        lengths=((1, 1), (1, 17), (40, 301), (1, 520)),
        block_size=block_size,
        head_size=32,
    )


PASSED = ((1, 17), (1, 520), (40, 301), (7, 64))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("window", [1, 33, 300])
def test_blocks_before_the_window_are_not_read(backend: Backend, name: str, window: int) -> None:
    scene = make_scene(k=name, v=name, lengths=PASSED, head_size=32)
    params = params_for(scene, sliding_window=window)
    passed = without_passed_blocks(scene, window)
    assert torch.equal(attend(backend, passed, params), attend(backend, scene, params))


def test_the_reference_does_not_read_blocks_before_the_window_either() -> None:
    scene = make_scene(k="float16", v="float16", lengths=PASSED, head_size=32)
    params = params_for(scene, sliding_window=33)
    passed = without_passed_blocks(scene, 33)
    for longer, is_finite in ((params, True), (replace(params, sliding_window=64), False)):
        out = paged_attention(ReferenceBackend(), passed.query, passed.cache, passed.batch, longer)
        assert out.isfinite().all() == is_finite


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_in_pages(backend: Backend, name: str) -> None:
    """What lies between the blocks of a layer is neither read nor written."""
    scene = make_scene(k=name, v=name, lengths=((1, 17), (40, 301)), head_size=32)
    params = params_for(scene)
    paged = replace(scene, cache=in_pages(scene.cache))
    assert torch.equal(attend(backend, paged, params), attend(backend, scene, params))
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 16, 2, 32, generator=generator)
    for cache in (scene.cache, paged.cache):
        write(backend, cache, key, value, torch.arange(16, 32))
    assert torch.equal(in_pages(scene.cache).blocks, paged.cache.blocks)


def test_garbage_is_really_there() -> None:
    """The test above compares nothing if the slots behind the last token are zeros."""
    clean, dirty = (make_scene(lengths=((1, 17),), garbage=garbage) for garbage in (False, True))
    assert not torch.equal(clean.cache.blocks, dirty.cache.blocks)


@pytest.mark.parametrize("name", ["float32", "int8+channel+dynamic", "fp8_e4m3+head"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("token", [0, 20, 61])
def test_query_that_is_not_finite_spoils_its_row_only(
    backend: Backend, name: str, bad: float, token: int
) -> None:
    scene = make_scene(k=name, v=name, lengths=((60, 300), (1, 1000), (1, 5)))
    assert_only_its_row_is_spoiled(backend, scene, bad, token)


# ---- the tests above can fail ----


@pytest.mark.parametrize("backend", [*ISAS, "reference"], indirect=True)
@pytest.mark.parametrize("name", KINDS)
def test_every_argument_matters(backend: Backend, name: str) -> None:
    scene = make_scene(k=name, v=name, lengths=((1, 100), (4, 200)), head_size=32)
    assert_every_argument_matters(backend, scene)


def test_reference_is_softmax_attention() -> None:
    """The reference itself, against torch's own attention over the same numbers."""
    scene = make_scene(lengths=((12, 12),), num_kv_heads=2, group=3, head_size=16)
    params = params_for(scene)
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(12, 2, 16, generator=generator)
    value = torch.randn(12, 2, 16, generator=generator)
    expected = torch.nn.functional.scaled_dot_product_attention(
        scene.query.transpose(0, 1),
        key.transpose(0, 1).repeat_interleave(3, dim=0),
        value.transpose(0, 1).repeat_interleave(3, dim=0),
        is_causal=True,
    ).transpose(0, 1)
    got = paged_attention(ReferenceBackend(), scene.query, scene.cache, scene.batch, params)
    torch.testing.assert_close(got, expected)
