"""What attention over the paged cache is checked with, whatever kernels compute it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from cache_cases import NAN_BYTE, Scene, make_batch, make_scene, new_cache, tensor_format
from tightkv.formats import BlockLayout, CodeType
from tightkv.kernels import AttentionBatch, AttentionParams, Backend, paged_attention
from tightkv.kernels.ops import ReferenceBackend
from triton_cases import moved_batch, moved_cache

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


def params_for(scene: Scene, **changes: object) -> AttentionParams:
    plain = AttentionParams(softmax_scale=1 / math.sqrt(scene.cache.layout.head_size))
    return replace(plain, **changes)  # type: ignore[arg-type]


def attend(
    backend: Backend,
    scene: Scene,
    params: AttentionParams,
    query: torch.Tensor | None = None,
    batch: AttentionBatch | None = None,
) -> torch.Tensor:
    """Of a scene on the CPU, on the backend's device and back again."""
    query = scene.query if query is None else query
    batch = scene.batch if batch is None else batch
    device = getattr(backend, "device", None)
    if device is None:
        return paged_attention(backend, query, scene.cache, batch, params)
    if params.sinks is not None:
        params = replace(params, sinks=params.sinks.to(device))
    cache = moved_cache(scene.cache)
    return paged_attention(backend, query.to(device), cache, moved_batch(batch), params).cpu()


def assert_near_reference(backends: Sequence[Backend], scene: Scene, **changes: object) -> None:
    """Each within the tolerance of the formats."""
    params = params_for(scene, **changes)
    expected = attend(ReferenceBackend(), scene, params)
    for backend in backends:
        got = attend(backend, scene, params)
        assert got.shape == expected.shape
        assert got.dtype == torch.float32
        error = ((got - expected).abs().max() / expected.abs().max()).item()
        assert error <= scene.tolerance, f"{backend.name}: {error:.1e}"


# ---- codes ----


def codes_as_v(backend: Backend, codes: torch.Tensor, code: CodeType) -> torch.Tensor:
    """Codes as read in sequences of one token, whose weight is 1: the output is V."""
    count = -(-len(codes) // 256)
    layout = BlockLayout(tensor_format("float16"), tensor_format(code.name), 1, 2, 256, 16)
    cache = new_cache(layout, count)
    stored = layout.v_codes(cache.blocks)  # [block, head, tile, channel tile, token, channel, i]
    stored[:, 0, 0, :, 0, :, 0] = _padded(codes, count * 256, stored.dtype).view(count, 16, 16)
    batch = make_batch([1] * count, [1] * count, torch.arange(count).int()[:, None])
    scene = Scene(cache, torch.zeros(count, 1, 2), batch)
    return attend(backend, scene, AttentionParams(1.0)).flatten()[: len(codes)]


def error_of_codes_as_k(
    backend: Backend, codes: torch.Tensor, code: CodeType, smallest: float
) -> float:
    """Token 0 has logit 0 and value 0, token 1 logit q * code and value 1: out = sigmoid.

    Each of 64 query heads looks at another channel, with a query that makes the logit 1.5 for
    codes above `smallest`.
    """
    count = -(-len(codes) // 64)
    layout = BlockLayout(tensor_format(code.name), tensor_format("float32"), 1, 64, 1, 16)
    cache = new_cache(layout, count)
    stored = layout.k_codes(cache.blocks)  # [block, head, tile, channel / i, token, i]
    raw = _padded(codes, count * 64, stored.dtype)
    stored[:, 0, 0, :, 1, :] = raw.view(count, -1, code.interleave)
    layout.v_codes(cache.blocks)[:, :, 0, 0, 1, 0, 0] = 1.0
    values = raw.view(code.dtype).float().view(count, 64)
    query = torch.diag_embed(torch.where(values.abs() > smallest, 1.5 / values.abs(), 1.0))
    batch = make_batch([1] * count, [2] * count, torch.arange(count).int()[:, None])
    got = attend(backend, Scene(cache, query, batch), AttentionParams(1.0))[..., 0]
    expected = torch.sigmoid(query.sum(dim=-1).double() * values.double())
    assert (expected - 0.5).abs().max() > 0.3
    return (got - expected).abs().max().item()


def _padded(codes: torch.Tensor, size: int, stored: torch.dtype) -> torch.Tensor:
    """With zeros up to a size, in the type that blocks show."""
    padded = torch.zeros(size, dtype=codes.dtype)
    padded[: len(codes)] = codes
    return padded.view(stored)


# ---- a row's bits do not depend on what else there is ----


def assert_rows_are_the_same_alone(
    backend: Backend, scene: Scene, params: AttentionParams, order: Sequence[int]
) -> None:
    """Each query row as a decode in a batch of its own, and some sequences in another order."""
    together = attend(backend, scene, params)
    batch, starts = scene.batch, scene.batch.query_start_loc.tolist()
    lengths = list(zip(batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist(), strict=True))
    rows = []
    for seq, (query_len, seq_len) in enumerate(lengths):
        for i in range(query_len):
            position = seq_len - query_len + i
            alone = make_batch([1], [position + 1], batch.block_table[seq : seq + 1])
            token = starts[seq] + i
            rows.append(attend(backend, scene, params, scene.query[token : token + 1], alone))
    assert torch.equal(together, torch.cat(rows))
    picked = [slice(starts[seq], starts[seq + 1]) for seq in order]
    others = make_batch(
        [lengths[seq][0] for seq in order],
        [lengths[seq][1] for seq in order],
        batch.block_table[list(order)],
    )
    query = torch.cat([scene.query[rows] for rows in picked])
    got = attend(backend, scene, params, query, others)
    assert torch.equal(got, torch.cat([together[rows] for rows in picked]))


def in_chunks(
    backend: Backend, scene: Scene, params: AttentionParams, ends: Sequence[int]
) -> torch.Tensor:
    """A scene's one sequence, whose queries are its last tokens, chunk by chunk.

    Args:
        backend: the kernels.
        scene: a sequence of `ends[-1]` tokens.
        params: of the attention.
        ends: where chunks end, and before them where the first one begins.
    """
    before = ends[-1] - len(scene.query)
    pieces = []
    for start, end in itertools.pairwise(ends):
        batch = make_batch([end - start], [end], scene.batch.block_table)
        query = scene.query[start - before : end - before]
        pieces.append(attend(backend, scene, params, query, batch))
    return torch.cat(pieces)


# ---- what lies behind the last token, and what is not finite ----


def assert_order_and_garbage_do_not_matter(backend: Backend, **scene_options: object) -> None:
    """Slots behind the last token hold finite codes of an earlier sequence."""

    def result(ordered: bool, garbage: bool) -> torch.Tensor:
        scene = make_scene(ordered=ordered, garbage=garbage, **scene_options)  # type: ignore[arg-type]
        return attend(backend, scene, params_for(scene))

    assert torch.equal(result(ordered=True, garbage=False), result(ordered=False, garbage=True))


def poisoned(scene: Scene) -> Scene:
    """All bytes of slots that were not written, those of dynamic scales too; NaN in any type."""
    layout, blocks = scene.cache.layout, scene.cache.blocks
    dirty = torch.full_like(blocks, NAN_BYTE)
    written = torch.zeros(len(blocks), layout.block_size, dtype=torch.bool)
    for row, seq_len in zip(scene.batch.block_table, scene.batch.seq_lens.tolist(), strict=True):
        token = torch.arange(seq_len)
        written[row[token // layout.block_size].long(), token % layout.block_size] = True
    block, slot = written.nonzero(as_tuple=True)
    tile, lane = slot // 16, slot % 16
    k = (
        block,
        slice(None),
        tile,
        slice(None),
        lane,
    )  # of [block, head, tile, channel / i, token, i]
    layout.k_codes(dirty)[k] = layout.k_codes(blocks)[k]
    i = layout.v_format.code.interleave
    # of [block, head, tile, channel tile, token / i, channel, i]
    v = (block, slice(None), tile, slice(None), lane // i, slice(None), lane % i)
    layout.v_codes(dirty)[v] = layout.v_codes(blocks)[v]
    for scales in (layout.k_scales, layout.v_scales):
        target, stored = scales(dirty), scales(blocks)
        if target is not None and stored is not None:
            target[block, :, slot] = stored[block, :, slot]
    return replace(scene, cache=replace(scene.cache, blocks=dirty))


def assert_only_its_row_is_spoiled(backend: Backend, scene: Scene, bad: float, token: int) -> None:
    """By a query that is not finite, of the third head."""
    params = params_for(scene)
    good = attend(backend, scene, params)
    query = scene.query.clone()
    query[token, 2, 5] = bad
    got = attend(backend, scene, params, query)
    assert got[token, 2].isnan().all()
    good[token, 2] = got[token, 2] = 0.0
    assert torch.equal(got, good)


# ---- the checks above can fail ----


def assert_every_argument_matters(backend: Backend, scene: Scene) -> None:
    """Each change of one moves the output by more than the tolerance."""
    batch, num_heads = scene.batch, scene.query.shape[1]
    plain = params_for(scene, sliding_window=50, softcap=5.0, sinks=torch.zeros(num_heads))
    table, lens = batch.block_table, batch.seq_lens
    without_last = replace(scene.cache, blocks=scene.cache.blocks.clone())
    without_last.blocks[int(table[1, (int(lens[1]) - 1) // scene.cache.layout.block_size])] = 0
    caches = {"last block": without_last}
    if scene.cache.k_scale is not None and scene.cache.v_scale is not None:
        caches["factors of K"] = replace(scene.cache, k_scale=scene.cache.k_scale * 1.1)
        caches["factors of V"] = replace(scene.cache, v_scale=scene.cache.v_scale * 2)
    changes: dict[str, tuple[Scene, AttentionParams]] = {
        "block table": (
            replace(scene, batch=replace(batch, block_table=table.roll(1, 1))),
            plain,
        ),
        "sequence length": (replace(scene, batch=replace(batch, seq_lens=lens - 1)), plain),
        "window": (scene, replace(plain, sliding_window=49)),
        "softcap": (scene, replace(plain, softcap=4.5)),
        "sinks": (scene, replace(plain, sinks=torch.ones(num_heads))),
        "softmax scale": (scene, replace(plain, softmax_scale=plain.softmax_scale * 1.1)),
        **{what: (replace(scene, cache=cache), plain) for what, cache in caches.items()},
    }
    before = attend(backend, scene, plain)
    for what, (changed, params) in changes.items():
        error = (attend(backend, changed, params) - before).abs().max() / before.abs().max()
        assert error > 10 * scene.tolerance, what
