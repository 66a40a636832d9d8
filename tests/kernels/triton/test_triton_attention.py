"""Attention in Triton: near the reference, and a row's bits do not depend on its batch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from cache_cases import (
    Scene,
    finite_codes,
    in_pages,
    make_batch,
    make_scene,
    new_cache,
    tensor_format,
    without_passed_blocks,
)
from tightkv.formats import BlockLayout, CodeType
from tightkv.formats.base import CODE_TYPES
from tightkv.kernels import AttentionParams
from tightkv.kernels.reference import read_sequence
from triton_cases import DEVICE, assert_near_reference, attend, params_for

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tightkv[triton]'")

# numpy, which the interpreter computes with, warns where what no row sees overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

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
KINDS = ["bfloat16", "int8+channel+dynamic", "fp8_e4m3+channel+dynamic"]
UNLIKE = list(itertools.permutations([*KINDS, "float32"], 2))
INF, NAN = float("inf"), float("nan")
# Two partitions of keys, one that just fits, a prompt, a chunk of a prompt, one token.
LENGTHS = ((1, 257), (1, 256), (5, 40), (30, 30), (1, 1))

# ---- against the reference ----


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str) -> None:
    assert_near_reference(make_scene(k=name, v=name, lengths=LENGTHS, value_size=48))


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
    """A sequence of one token has a weight of 1: the output is V. Subnormals and zeros too."""
    codes = finite_codes(code)
    codes = codes[:: max(1, len(codes) // 2048)]
    count = -(-len(codes) // 256)
    layout = BlockLayout(tensor_format("float16"), tensor_format(code.name), 1, 2, 256, 16)
    cache = new_cache(layout, count)
    padded = torch.zeros(count * 256, dtype=code.dtype)
    padded[: len(codes)] = codes
    stored = layout.v_codes(cache.blocks)  # [block, head, tile, channel tile, token, channel, i]
    raw = padded.view(torch.uint8) if stored.dtype == torch.uint8 else padded
    stored[:, 0, 0, :, 0, :, 0] = raw.reshape(count, 16, 16)
    batch = make_batch([1] * count, [1] * count, torch.arange(count).int()[:, None])
    scene = Scene(cache, torch.zeros(count, 1, 2), batch)
    got = attend(scene, AttentionParams(1.0)).flatten()
    expected = padded.float()
    # On a GPU, products of float32 keep 22 bits.
    tolerance = 2.0**-21 if code.name == "float32" and DEVICE.type == "cuda" else 0.0
    assert ((got - expected).abs() <= tolerance * expected.abs()).all()


@pytest.mark.parametrize("code", CODE_TYPES.values(), ids=lambda code: code.name)
def test_every_code_of_k_is_read_right(code: CodeType) -> None:
    """Token 0 has logit 0 and value 0, token 1 logit q * code and value 1: out = sigmoid.

    Each of 64 query heads looks at another channel.
    """
    codes = finite_codes(code)
    codes = codes[:: max(1, len(codes) // 256)]
    count = -(-len(codes) // 64)
    layout = BlockLayout(tensor_format(code.name), tensor_format("float32"), 1, 64, 1, 16)
    cache = new_cache(layout, count)
    padded = torch.zeros(count * 64, dtype=code.dtype)
    padded[: len(codes)] = codes
    stored = layout.k_codes(cache.blocks)  # [block, head, tile, channel / i, token, i]
    raw = padded.view(torch.uint8) if stored.dtype == torch.uint8 else padded
    stored[:, 0, 0, :, 1, :] = raw.reshape(count, -1, code.interleave)
    layout.v_codes(cache.blocks)[:, :, 0, 0, 1, 0, 0] = 1.0
    values = padded.float().reshape(count, 64)
    normal = values.abs() > 2.0**-90
    query = torch.diag_embed(torch.where(normal, 1.5 / values.abs(), 1.0))
    batch = make_batch([1] * count, [2] * count, torch.arange(count).int()[:, None])
    got = attend(Scene(cache, query, batch), AttentionParams(1.0))[..., 0]
    expected = torch.sigmoid(query.sum(dim=-1).double() * values.double())
    assert (got - expected).abs().max() <= 1e-6
    assert (expected - 0.5).abs().max() > 0.3


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


def rows_alone(scene: Scene, params: AttentionParams) -> torch.Tensor:
    """Each query row as a decode in a batch of its own, with the tokens up to its position."""
    starts = scene.batch.query_start_loc.tolist()
    rows = []
    for seq, seq_len in enumerate(scene.batch.seq_lens.tolist()):
        query_len = starts[seq + 1] - starts[seq]
        for i in range(query_len):
            position = seq_len - query_len + i
            batch = make_batch([1], [position + 1], scene.batch.block_table[seq : seq + 1])
            token = starts[seq] + i
            rows.append(attend(scene, params, scene.query[token : token + 1], batch))
    return torch.cat(rows)


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
    together = attend(scene, params)
    assert torch.equal(together, rows_alone(scene, params))
    order = [3, 0, 1]
    starts = scene.batch.query_start_loc.tolist()
    picked = [scene.query[starts[i] : starts[i + 1]] for i in order]
    batch = make_batch(
        [len(query) for query in picked],
        scene.batch.seq_lens[order].tolist(),
        scene.batch.block_table[order],
    )
    got = attend(scene, params, torch.cat(picked), batch)
    assert torch.equal(got, torch.cat([together[starts[i] : starts[i + 1]] for i in order]))


@pytest.mark.parametrize("group", [1, 3, pytest.param(32, marks=pytest.mark.slow)])
def test_prompt_in_chunks_is_the_prompt_whole(group: int) -> None:
    name = "int8+channel+dynamic"
    scene = make_scene(
        k=name, v=name, lengths=((270, 270),), num_kv_heads=1, group=group, head_size=16
    )
    params = params_for(scene)
    ends = [0, 250, 257, 258, 270]
    scene = replace(scene, query=scene.query[-20:])
    whole = attend(scene, params, batch=make_batch([20], [270], scene.batch.block_table))
    pieces = []
    for start, end in itertools.pairwise(ends[1:]):
        batch = make_batch([end - start], [end], scene.batch.block_table)
        pieces.append(attend(scene, params, scene.query[start - 250 : end - 250], batch))
    assert torch.equal(whole, torch.cat(pieces))


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
    """Slots behind the last token hold finite codes of an earlier sequence."""
    lengths = ((1, 1), (3, 21), (1, 260))
    block_size = 64 if "dynamic" in name else 16

    def result(ordered: bool, garbage: bool) -> torch.Tensor:
        scene = make_scene(
            k=name,
            v=name,
            lengths=lengths,
            num_kv_heads=1,
            block_size=block_size,
            head_size=32,
            ordered=ordered,
            garbage=garbage,
        )
        return attend(scene, params_for(scene))

    clean = result(ordered=True, garbage=False)
    assert torch.equal(clean, result(ordered=False, garbage=True))


@pytest.mark.parametrize("name", FORMATS)
def test_nan_behind_the_last_token_does_not_matter(name: str) -> None:
    """All bytes of slots that were not written, those of dynamic scales too; NaN in any type."""
    poison = 0xFF
    lengths = ((1, 1), (3, 21), (1, 260))
    scene = make_scene(k=name, v=name, lengths=lengths, num_kv_heads=1, head_size=32)
    layout = scene.cache.layout
    clean = attend(scene, params_for(scene))
    poisoned = torch.full_like(scene.cache.blocks, poison)
    written = torch.zeros(len(poisoned), layout.block_size, dtype=torch.bool)
    for row, seq_len in zip(scene.batch.block_table, scene.batch.seq_lens.tolist(), strict=True):
        for token in range(seq_len):
            written[int(row[token // 16]), token % 16] = True
    block, slot = written.nonzero(as_tuple=True)
    for view in (layout.k_codes, layout.v_codes):
        into, source = view(poisoned), view(scene.cache.blocks)
        if view == layout.k_codes:  # [block, head, tile, channel / i, token, i]
            into[block, :, 0, :, slot] = source[block, :, 0, :, slot]
        else:  # [block, head, tile, channel tile, token / i, channel, i]
            i = layout.v_format.code.interleave
            at = (block, slice(None), 0, slice(None), slot // i, slice(None), slot % i)
            into[at] = source[at]
    for scales in (layout.k_scales, layout.v_scales):
        target, stored = scales(poisoned), scales(scene.cache.blocks)
        if target is not None and stored is not None:
            target[block, :, slot] = stored[block, :, slot]
    dirty = replace(scene, cache=replace(scene.cache, blocks=poisoned))
    assert torch.equal(clean, attend(dirty, params_for(scene)))


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


@pytest.mark.parametrize("name", ["float32", "int8+channel+dynamic", "fp8_e4m3+head"])
@pytest.mark.parametrize(("bad", "token"), [(NAN, 0), (INF, 8), (NAN, 9), (INF, 10)])
def test_query_that_is_not_finite_spoils_its_row_only(name: str, bad: float, token: int) -> None:
    lengths = ((9, 20), (1, 270), (1, 5))
    scene = make_scene(k=name, v=name, lengths=lengths, num_kv_heads=1, group=3, head_size=32)
    params = params_for(scene)
    good = attend(scene, params)
    query = scene.query.clone()
    query[token, 2, 5] = bad
    got = attend(scene, params, query)
    assert got[token, 2].isnan().all()
    good[token, 2] = got[token, 2] = 0.0
    assert torch.equal(got, good)


# ---- the tests above can fail ----


@pytest.mark.parametrize("name", KINDS)
def test_every_argument_matters(name: str) -> None:
    scene = make_scene(k=name, v=name, lengths=((1, 300), (4, 200)), num_kv_heads=1, group=2)
    plain = params_for(scene, sliding_window=50, softcap=5.0, sinks=torch.zeros(2))
    table, lens = scene.batch.block_table, scene.batch.seq_lens
    changed = {
        "block table": attend(
            scene, plain, batch=replace(scene.batch, block_table=table.roll(1, 1))
        ),
        "sequence length": attend(scene, plain, batch=replace(scene.batch, seq_lens=lens - 1)),
        "window": attend(scene, replace(plain, sliding_window=49)),
        "softcap": attend(scene, replace(plain, softcap=4.0)),
        "sinks": attend(scene, replace(plain, sinks=torch.ones(2))),
        "softmax scale": attend(scene, replace(plain, softmax_scale=plain.softmax_scale * 1.1)),
    }
    before = attend(scene, plain)
    for what, after in changed.items():
        error = (after - before).abs().max() / before.abs().max()
        assert error > 10 * scene.tolerance, what
