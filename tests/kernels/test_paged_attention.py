"""Attention over the paged cache: every instruction set against the reference, and invariance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from cache_cases import (
    ISAS,
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
from tightkv.formats import BlockLayout, CodeType
from tightkv.formats.base import CODE_TYPES
from tightkv.kernels import AttentionBatch, AttentionParams, LayerCache, paged_attention
from tightkv.kernels.cpu import CpuBackend
from tightkv.kernels.ops import ReferenceBackend
from tightkv.kernels.reference import read_sequence

# Every code type, as it is used.
FORMATS = [
    "float32",
    "float16",
    "bfloat16",
    "int8+tensor",
    "int8+dynamic",
    "int8+channel+dynamic",
    "fp8_e4m3+head",
    "fp8_e4m3+dynamic",
    "fp8_e5m2",
]
# One of each kind of arithmetic.
KINDS = ["float16", "int8+channel+dynamic", "int8+channel", "fp8_e4m3+channel+dynamic"]
NAN = float("nan")


def params_for(scene: Scene, **changes: object) -> AttentionParams:
    plain = AttentionParams(softmax_scale=1 / math.sqrt(scene.cache.layout.head_size))
    return replace(plain, **changes)  # type: ignore[arg-type]


def attend(
    isa: str, scene: Scene, params: AttentionParams, query: torch.Tensor | None = None
) -> torch.Tensor:
    query = scene.query if query is None else query
    return paged_attention(CpuBackend(isa), query, scene.cache, scene.batch, params)


def assert_near_reference(scene: Scene, **changes: object) -> None:
    """Every instruction set, within the tolerance of the formats."""
    params = params_for(scene, **changes)
    expected = paged_attention(ReferenceBackend(), scene.query, scene.cache, scene.batch, params)
    for isa in ISAS:
        got = attend(isa, scene, params)
        assert got.shape == expected.shape
        assert got.dtype == torch.float32
        error = ((got - expected).abs().max() / expected.abs().max()).item()
        assert error <= scene.tolerance, f"{isa}: {error:.1e}"


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
        assert_near_reference(make_scene(k=k, v=v, lengths=lengths, value_size=48))


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
        assert_near_reference(scene)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 64])
def test_groups(group: int) -> None:
    for name in KINDS:
        scene = make_scene(
            k=name, v=name, lengths=((1, 70), (9, 33), (50, 60)), group=group, head_size=32
        )
        assert_near_reference(scene)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_sizes(block_size: int) -> None:
    for name in KINDS:
        lengths = ((1, 1), (1, block_size), (1, block_size + 1), (70, 300), (1, 555))
        assert_near_reference(make_scene(k=name, v=name, lengths=lengths, block_size=block_size))


LENGTHS = [1, 2, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1000]


@pytest.mark.parametrize("name", FORMATS)
def test_lengths_of_decodes(name: str) -> None:
    assert_near_reference(make_scene(k=name, v=name, lengths=[(1, n) for n in LENGTHS]))


@pytest.mark.parametrize("name", KINDS)
def test_ragged_batch(name: str) -> None:
    """Decodes, whole prompts, chunks in the middle of a prompt, and a sequence without queries."""
    lengths = ((1, 513), (16, 16), (1, 1), (40, 300), (0, 33), (255, 257), (7, 1000), (1, 16))
    assert_near_reference(make_scene(k=name, v=name, lengths=lengths, head_size=32))


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
        assert_near_reference(scene, sliding_window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_and_strided_queries(dtype: torch.dtype) -> None:
    """`[heads, tokens, size]` transposed, as a model hands it over."""
    scene = make_scene(k="int8+channel+dynamic", v="float16", lengths=((30, 90),))
    query = scene.query.to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
    assert not query.is_contiguous()
    params = params_for(scene)
    for isa in ISAS:
        packed = attend(isa, scene, params, query.contiguous().float())
        assert torch.equal(attend(isa, scene, params, query), packed)
    assert_near_reference(replace(scene, query=query))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("code", CODE_TYPES.values(), ids=lambda code: code.name)
def test_every_code_of_v_is_read_exactly(isa: str, code: CodeType) -> None:
    """A sequence of one token has a weight of 1: the output is V. Subnormals and zeros too."""
    codes = finite_codes(code)
    count = -(-len(codes) // 1024)
    layout = BlockLayout(tensor_format("float16"), tensor_format(code.name), 1, 2, 1024, 16)
    cache = new_cache(layout, count)
    padded = torch.zeros(count * 1024, dtype=code.dtype)
    padded[: len(codes)] = codes
    stored = layout.v_codes(cache.blocks)  # [block, head, tile, channel tile, token, channel, i]
    raw = padded.view(torch.uint8) if stored.dtype == torch.uint8 else padded
    stored[:, 0, 0, :, 0, :, 0] = raw.reshape(count, 64, 16)
    batch = make_batch([1] * count, [1] * count, torch.arange(count).int()[:, None])
    query = torch.zeros(count, 1, 2)
    got = paged_attention(CpuBackend(isa), query, cache, batch, AttentionParams(1.0)).flatten()
    expected = padded.float()
    # Integer weights have 16 bits: 1 is 32,767 steps of 1/32,767, which rounds once or twice.
    tolerance = 2.0**-22 if code.name == "int8" else 0.0
    assert ((got - expected).abs() <= tolerance * expected.abs()).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("code", CODE_TYPES.values(), ids=lambda code: code.name)
def test_every_code_of_k_is_read_right(isa: str, code: CodeType) -> None:
    """Token 0 has logit 0 and value 0, token 1 logit q * code and value 1: out = sigmoid."""
    codes = finite_codes(code)
    codes = codes[:: max(1, len(codes) // 1536)]
    heads = 256
    count = -(-len(codes) // heads)
    layout = BlockLayout(tensor_format(code.name), tensor_format("float32"), heads, 2, 1, 16)
    cache = new_cache(layout, count)
    padded = torch.zeros(count * heads, dtype=code.dtype)
    padded[: len(codes)] = codes
    stored = layout.k_codes(cache.blocks)  # [block, head, tile, channel / i, token, i]
    raw = padded.view(torch.uint8) if stored.dtype == torch.uint8 else padded
    stored[:, :, 0, 0, 1, 0] = raw.reshape(count, heads)
    layout.v_codes(cache.blocks)[:, :, 0, 0, 1, 0, 0] = 1.0
    values = padded.float().reshape(count, heads)
    normal = values.abs() > 2.0**-120
    query = torch.zeros(count, heads, 2)
    query[..., 0] = torch.where(normal, 1.5 / values.abs(), 1.0)
    batch = make_batch([1] * count, [2] * count, torch.arange(count).int()[:, None])
    got = paged_attention(CpuBackend(isa), query, cache, batch, AttentionParams(1.0))[..., 0]
    expected = torch.sigmoid(query[..., 0].double() * values.double())
    assert (got - expected).abs().max() <= (2e-5 if code.name == "int8" else 1e-6)
    assert (expected - 0.5).abs().max() > 0.3


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e-5])
def test_tiny_queries_weigh_all_keys_alike(name: str, size: float) -> None:
    scene = make_scene(k=name, v=name, lengths=((3, 300),))
    assert_near_reference(replace(scene, query=scene.query * size))


@pytest.mark.parametrize("name", KINDS)
def test_large_logits_choose_one_key(name: str) -> None:
    """The query lies along one key: that weighs nearly 1, and most of the others underflow."""
    scene = make_scene(k=name, v=name, lengths=((1, 300),), num_kv_heads=1, group=1)
    keys, _ = read_sequence(scene.cache, scene.batch.block_table[0], 300)
    assert_near_reference(replace(scene, query=10 * keys[77:78]))
    for isa in ISAS:
        assert attend(isa, scene, params_for(scene), scene.query * 1e6).isfinite().all()


# ---- a row's bits do not depend on what else there is ----


def rows_alone(isa: str, scene: Scene, params: AttentionParams) -> torch.Tensor:
    """Each query row in a batch of its own, with the tokens up to its position."""
    starts = scene.batch.query_start_loc.tolist()
    rows = []
    for seq, seq_len in enumerate(scene.batch.seq_lens.tolist()):
        query_len = starts[seq + 1] - starts[seq]
        for i in range(query_len):
            position = seq_len - query_len + i
            batch = make_batch([1], [position + 1], scene.batch.block_table[seq : seq + 1])
            token = starts[seq] + i
            query = scene.query[token : token + 1]
            rows.append(paged_attention(CpuBackend(isa), query, scene.cache, batch, params))
    return torch.cat(rows)


INVARIANCE = [
    {},
    {"sliding_window": 40},
    {"sliding_window": 300, "softcap": 5.0, "sinks": torch.tensor([0.0, 1.0, -1.0, 3.0])},
]


@pytest.mark.parametrize("isa", ISAS)
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
    isa: str, k: str, v: str, changes: dict[str, object]
) -> None:
    """Also: decode of token t is row t of the prefill."""
    lengths = ((1, 257), (60, 60), (1, 1), (33, 700), (1, 1000), (5, 514))
    scene = make_scene(k=k, v=v, lengths=lengths, head_size=32)
    params = params_for(scene, **changes)
    together = attend(isa, scene, params)
    assert torch.equal(together, rows_alone(isa, scene, params))
    order = [3, 0, 5, 2]
    starts = scene.batch.query_start_loc.tolist()
    picked = [scene.query[starts[i] : starts[i + 1]] for i in order]
    batch = make_batch(
        [len(query) for query in picked],
        scene.batch.seq_lens[order].tolist(),
        scene.batch.block_table[order],
    )
    got = paged_attention(CpuBackend(isa), torch.cat(picked), scene.cache, batch, params)
    assert torch.equal(got, torch.cat([together[starts[i] : starts[i + 1]] for i in order]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["float16", "int8+channel+dynamic", "fp8_e4m3+dynamic"])
@pytest.mark.parametrize("group", [1, 3, 8, 64])
def test_prompt_in_chunks_is_the_prompt_whole(isa: str, name: str, group: int) -> None:
    scene = make_scene(
        k=name, v=name, lengths=((290, 290),), num_kv_heads=1, group=group, head_size=32
    )
    params = params_for(scene)
    whole = attend(isa, scene, params)
    pieces = []
    for start in range(0, 290, 7):
        end = min(start + 7, 290)
        batch = make_batch([end - start], [end], scene.batch.block_table)
        query = scene.query[start:end]
        pieces.append(paged_attention(CpuBackend(isa), query, scene.cache, batch, params))
    assert torch.equal(whole, torch.cat(pieces))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["float32", "int8+channel+dynamic"])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("window", [None, 300])
def test_thread_counts(isa: str, name: str, block_size: int, window: int | None) -> None:
    """The more threads, the more pieces: of fewer chunks, in the end of a single head."""
    lengths = ((1, 1000), (100, 400), (1, 20), (1, 513))
    # Of float32 four heads are read together, and the fifth alone.
    scene = make_scene(k=name, v=name, lengths=lengths, num_kv_heads=5, block_size=block_size)
    params = params_for(scene, sliding_window=window)
    results = []
    for count in (1, 2, 3, 8):
        with threads(count):
            results.append(attend(isa, scene, params))
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_block_order_and_garbage_do_not_matter(isa: str, name: str, block_size: int) -> None:
    """Slots behind the last token hold finite codes of an earlier sequence."""
    lengths = ((1, 1), (1, 17), (40, 301), (1, 520))

    def result(ordered: bool, garbage: bool) -> torch.Tensor:
        scene = make_scene(
            k=name,
            v=name,
            lengths=lengths,
            block_size=block_size,
            head_size=32,
            ordered=ordered,
            garbage=garbage,
        )
        return attend(isa, scene, params_for(scene))

    clean = result(ordered=True, garbage=False)
    assert torch.equal(clean, result(ordered=False, garbage=False))
    assert torch.equal(clean, result(ordered=True, garbage=True))
    assert torch.equal(clean, result(ordered=False, garbage=True))


PASSED = ((1, 17), (1, 520), (40, 301), (7, 64))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("window", [1, 33, 300])
def test_blocks_before_the_window_are_not_read(isa: str, name: str, window: int) -> None:
    scene = make_scene(k=name, v=name, lengths=PASSED, head_size=32)
    params = params_for(scene, sliding_window=window)
    passed = without_passed_blocks(scene, window)
    assert torch.equal(attend(isa, passed, params), attend(isa, scene, params))


def test_the_reference_does_not_read_blocks_before_the_window_either() -> None:
    scene = make_scene(k="float16", v="float16", lengths=PASSED, head_size=32)
    params = params_for(scene, sliding_window=33)
    passed = without_passed_blocks(scene, 33)
    for longer, is_finite in ((params, True), (replace(params, sliding_window=64), False)):
        out = paged_attention(ReferenceBackend(), passed.query, passed.cache, passed.batch, longer)
        assert out.isfinite().all() == is_finite


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_in_pages(isa: str, name: str) -> None:
    """What lies between the blocks of a layer is neither read nor written."""
    scene = make_scene(k=name, v=name, lengths=((1, 17), (40, 301)), head_size=32)
    params = params_for(scene)
    paged = replace(scene, cache=in_pages(scene.cache))
    assert torch.equal(attend(isa, paged, params), attend(isa, scene, params))
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 16, 2, 32, generator=generator)
    for cache in (scene.cache, paged.cache):
        write(CpuBackend(isa), cache, key, value, torch.arange(16, 32))
    assert torch.equal(in_pages(scene.cache).blocks, paged.cache.blocks)


def test_garbage_is_really_there() -> None:
    """The test above compares nothing if the slots behind the last token are zeros."""
    clean, dirty = (make_scene(lengths=((1, 17),), garbage=garbage) for garbage in (False, True))
    assert not torch.equal(clean.cache.blocks, dirty.cache.blocks)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["float32", "int8+channel+dynamic", "fp8_e4m3+head"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("token", [0, 20, 61])
def test_query_that_is_not_finite_spoils_its_row_only(
    isa: str, name: str, bad: float, token: int
) -> None:
    scene = make_scene(k=name, v=name, lengths=((60, 300), (1, 1000), (1, 5)))
    params = params_for(scene)
    good = attend(isa, scene, params)
    query = scene.query.clone()
    query[token, 2, 5] = bad
    got = attend(isa, scene, params, query)
    assert got[token, 2].isnan().all()
    good[token, 2] = got[token, 2] = 0.0
    assert torch.equal(got, good)


# ---- the tests above can fail ----


@pytest.mark.parametrize("isa", [*ISAS, "reference"])
@pytest.mark.parametrize("name", KINDS)
def test_every_argument_matters(isa: str, name: str) -> None:
    backend = ReferenceBackend() if isa == "reference" else CpuBackend(isa)
    scene = make_scene(k=name, v=name, lengths=((1, 100), (4, 200)), head_size=32)
    plain = params_for(scene, sliding_window=50, softcap=5.0, sinks=torch.zeros(4))

    def run(
        params: AttentionParams = plain,
        batch: AttentionBatch = scene.batch,
        cache: LayerCache = scene.cache,
    ) -> torch.Tensor:
        return paged_attention(backend, scene.query, cache, batch, params)

    table, lens = scene.batch.block_table, scene.batch.seq_lens
    zeroed = replace(scene.cache, blocks=scene.cache.blocks.clone())
    zeroed.blocks[int(table[1, -1])] = 0
    changed = {
        "block table": run(batch=replace(scene.batch, block_table=table.roll(1, 1))),
        "sequence length": run(batch=replace(scene.batch, seq_lens=lens - 1)),
        "window": run(replace(plain, sliding_window=49)),
        "softcap": run(replace(plain, softcap=4.9)),
        "sinks": run(replace(plain, sinks=torch.ones(4))),
        "softmax scale": run(replace(plain, softmax_scale=plain.softmax_scale * 1.1)),
        "last block": run(cache=zeroed),
    }
    before = run()
    for what, after in changed.items():
        error = (after - before).abs().max() / before.abs().max()
        assert error > 10 * scene.tolerance, what
    if scene.cache.k_scale is not None and scene.cache.v_scale is not None:
        for cache in (
            replace(scene.cache, k_scale=scene.cache.k_scale * 1.1),
            replace(scene.cache, v_scale=scene.cache.v_scale * 2),
        ):
            after = run(cache=cache)
            assert (after - before).abs().max() > 10 * scene.tolerance * before.abs().max()


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
