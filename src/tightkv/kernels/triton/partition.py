"""Attention over the keys of one partition, tile by tile: what prefill and decode share.

A partition's result is a largest logit, a sum of weights relative to it, and the sum of V with
these weights. docs/gpu.md says why a row's bits do not depend on its batch.
"""

# Triton compiles what follows a return, too, unless it stands in an else.
# ruff: noqa: RET505

from __future__ import annotations

import triton
import triton.language as tl

from tightkv.kernels.triton.codes import decode, decode_pair, split_pair, split_terms, to_int8

__all__ = ["LOG2_E", "NO_LOGIT", "attend_partition", "load_query", "logit_factor", "power_of_two"]

LOG2_E = tl.constexpr(1.4426950408889634)
NO_LOGIT = tl.constexpr(-2e38)
"""The largest logit of no keys."""

_HIDDEN = tl.constexpr(
    -3e38
)  # the logit of a key that a row does not see: 2^(this - NO_LOGIT) is 0
_SMALLEST_STEP = tl.constexpr(2.0**-120)  # of a query row: smaller ones are rounded to 0
_WEIGHT_STEPS = tl.constexpr(8388608.0)  # weights are summed in steps of 2^-23: 128 fit int32


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """2^exponent of a whole number in float32, at most 126; 0 below -126. Exact on any device."""
    whole = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_of(peak: tl.tensor) -> tl.tuple:
    """2^e and 2^-e where e is the exponent of a number from 0 up, within -100 and 126."""
    biased = peak.to(tl.int32, bitcast=True) >> 23
    biased = tl.minimum(tl.maximum(biased, 27), 253)
    up = (biased << 23).to(tl.float32, bitcast=True)
    return up, ((254 - biased) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Where 1 - 2 / (e^2x + 1) would cancel, the series."""
    square = x * x
    series = x + x * square * (
        -1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))
    )
    limited = tl.minimum(tl.maximum(x, -20.0), 20.0)
    direct = 1.0 - 2.0 / (tl.exp2(limited * (2.0 * LOG2_E)) + 1.0)
    return tl.where(tl.abs(x) < 0.3, series, direct)


@triton.jit
def _query_part(
    query: tl.tensor,
    at: tl.tensor,
    valid: tl.tensor,
    static: tl.tensor,
    kv_head: tl.tensor,
    part: tl.constexpr,
    S: tl.constexpr,
) -> tl.tuple:
    """Channels that meet one part of the K units, static factors included; and whether finite."""
    channel = tl.arange(0, S.layer.k.units)[None, :] * S.layer.k.interleave + part
    inside = channel < S.layer.k.size
    q = tl.load(query + (at[:, None] + channel), mask=valid[:, None] & inside, other=0.0)
    q = q.to(tl.float32)
    if S.layer.k.static:
        q *= tl.load(static + kv_head * S.layer.k.size + channel, mask=inside, other=1.0)
    finite = (q.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    return tl.where(finite, q, 0.0), tl.min(finite.to(tl.int32), axis=1)


@triton.jit
def _query_terms(part: tl.tensor, peak: tl.tensor, S: tl.constexpr) -> tl.tuple:
    """What products take of a part of the query rows, and what they lack as a factor."""
    if S.quantized_query:
        step = tl.div_rn(peak, tl.full(peak.shape, 127.0, tl.float32))
        step = tl.maximum(step, _SMALLEST_STEP)
        return (to_int8(tl.div_rn(part, tl.broadcast_to(step[:, None], part.shape))),), step
    else:
        up, down = _scale_of(peak)
        return split_terms(part * down[:, None], S, S.layer.k.mantissa, S.q_terms), up


@triton.jit
def load_query(
    query: tl.tensor,
    at: tl.tensor,
    valid: tl.tensor,
    static: tl.tensor,
    kv_head: tl.tensor,
    S: tl.constexpr,
) -> tl.tuple:
    """Terms of each part of the query rows, the factor they lack, and which are finite."""
    K: tl.constexpr = S.layer.k
    first, finite = _query_part(query, at, valid, static, kv_head, 0, S)
    peak = tl.max(tl.abs(first), axis=1)
    if K.interleave == 2:
        second, finite_too = _query_part(query, at, valid, static, kv_head, 1, S)
        peak = tl.maximum(peak, tl.max(tl.abs(second), axis=1))
        first_terms, up = _query_terms(first, peak, S)
        second_terms, up = _query_terms(second, peak, S)
        return (first_terms, second_terms), up, (finite & finite_too) != 0
    else:
        terms, up = _query_terms(first, peak, S)
        return (terms,), up, finite != 0


@triton.jit
def _block_of(
    table: tl.tensor,
    position: tl.tensor,
    end: tl.tensor,
    block_size: tl.constexpr,
    in_tile: tl.constexpr,
) -> tl.tensor:
    """Block ids of keys, of which `in_tile` after each other lie in the same tile of 16 tokens.

    That they are equal makes neighbours' codes contiguous: the compiler has to be told.
    """
    tile_start = position // 16 * 16
    block = tl.load(table + tile_start // block_size, mask=tile_start < end, other=0)
    return tl.max_constancy(block, [in_tile]).to(tl.int64)


@triton.jit
def _logits(
    q: tl.tuple,
    codes: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """Products q · k for a tile of keys, `[rows, tokens]`."""
    K: tl.constexpr = S.layer.k
    column = tl.arange(0, S.tokens // K.pack)
    position = start + column * K.pack
    tile = position // 16 % (S.layer.block_size // 16)
    base = _block_of(table, position, end, S.layer.block_size, 16 // K.pack) * K.block
    base += K.offset + kv_head * K.head + tile * (16 * K.stored_units // K.pack)
    base += column % (16 // K.pack)  # a tile of keys starts with a tile of the block
    unit = tl.arange(0, K.units)
    at = codes + (base[None, :] + unit[:, None] * (16 // K.pack))
    if K.stored_units == K.units:
        stored = tl.load(at)
    else:
        stored = tl.load(at, mask=unit[:, None] < K.stored_units, other=0)
    sums = tl.zeros([S.rows, S.tokens], tl.float32)
    if S.quantized_query:
        even, odd = split_pair(stored, S)
        whole = tl.dot(q[0][0], even, tl.zeros(sums.shape, tl.int32))
        sums = tl.dot(q[1][0], odd, whole).to(tl.float32)
    elif K.interleave == 2:
        even, odd = decode_pair(stored, S)
        for term in tl.static_range(tl.constexpr(S.q_terms)):
            sums = tl.dot(q[0][term], even, sums)
            sums = tl.dot(q[1][term], odd, sums)
    else:
        k = decode(stored, S, K.mantissa)
        for term in tl.static_range(tl.constexpr(S.q_terms)):
            sums = tl.dot(q[0][term], k, sums, input_precision=S.f32_precision)
    return sums


@triton.jit
def _load_v(
    codes: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """V's units of a tile of keys, `[tokens / interleave, channels / pack]`."""
    V: tl.constexpr = S.layer.v
    row = tl.arange(0, S.tokens // V.interleave)
    position = start + row * V.interleave
    tile = position // 16 % (S.layer.block_size // 16)
    base = _block_of(table, position, end, S.layer.block_size, 16 // V.interleave) * V.block
    base += V.offset + kv_head * V.head + tile * (16 * V.stored // (V.interleave * V.pack))
    base += row % (16 // V.interleave) * (16 // V.pack)
    column = tl.arange(0, V.tile // V.pack)
    inner = column // (16 // V.pack) * (256 // (V.interleave * V.pack)) + column % (16 // V.pack)
    at = codes + (base[:, None] + inner[None, :])
    inside = column[None, :] < V.stored // V.pack
    # Behind the last token may lie NaN, which a weight of 0 would not undo; int8 has none.
    # So it may before the window, whose blocks are others' by then.
    written = (position < end)[:, None]
    if S.window:
        written &= (position >= first)[:, None]
    if V.interleave == 2 and V.stored == V.tile:
        return tl.load(at)
    elif V.interleave == 2:
        return tl.load(at, mask=inside, other=0)
    elif V.stored == V.tile:
        return tl.load(at, mask=written, other=0)
    else:
        return tl.load(at, mask=written & inside, other=0)


@triton.jit
def _weigh(weights: tl.tensor, stored: tl.tensor, sums: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """`sums + weights @ v`, `[rows, channels]`."""
    V: tl.constexpr = S.layer.v
    if V.interleave == 2:
        even, odd = decode_pair(stored, S)
        pairs = tl.reshape(weights, [S.rows, S.tokens // 2, 2])
        of_even, of_odd = tl.split(pairs)
        even_terms = split_terms(of_even, S, V.mantissa, S.p_terms)
        odd_terms = split_terms(of_odd, S, V.mantissa, S.p_terms)
        for term in tl.static_range(tl.constexpr(S.p_terms)):
            sums = tl.dot(even_terms[term], even, sums)
            sums = tl.dot(odd_terms[term], odd, sums)
    else:
        v = decode(stored, S, V.mantissa)
        terms = split_terms(weights, S, V.mantissa, S.p_terms)
        for term in tl.static_range(tl.constexpr(S.p_terms)):
            sums = tl.dot(terms[term], v, sums, input_precision=S.f32_precision)
    return sums


@triton.jit
def _load_scales(
    scales: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    S: tl.constexpr,
    T: tl.constexpr,
) -> tl.tensor:
    """Dynamic scales of a tile of keys; 0 behind the last token and before the window."""
    position = start + tl.arange(0, S.tokens)
    block = _block_of(table, position, end, S.layer.block_size, 16)
    at = block * T.scale_block + T.scale_offset + kv_head * S.layer.block_size
    at += position % S.layer.block_size
    written = position < end
    if S.window:
        written &= position >= first
    return tl.load(scales + at, mask=written, other=0.0).to(tl.float32)


@triton.jit
def _add_tile(
    q: tl.tuple,
    factor: tl.tensor,
    row_position: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    k_codes: tl.tensor,
    v_codes: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    largest: tl.tensor,
    weight_sum: tl.tensor,
    sums: tl.tensor,
    S: tl.constexpr,
) -> tl.tuple:
    """Take a tile of keys into a partition's largest logit, sum of weights and weighted sum."""
    logits = _logits(q, k_codes, table, kv_head, start, end, S) * factor[:, None]
    stored_v = _load_v(v_codes, table, kv_head, start, first, end, S)
    if S.layer.k.dynamic:
        k_scales = _load_scales(scales, table, kv_head, start, first, end, S, S.layer.k)
        logits *= k_scales[None, :]
    if S.softcap:
        logits = _tanh(logits) * (softcap * LOG2_E)
    position = (start + tl.arange(0, S.tokens))[None, :]
    visible = position <= row_position[:, None]
    if S.window:
        visible &= position > row_position[:, None] - window
    logits = tl.where(visible, logits, _HIDDEN)
    new_largest = tl.maximum(largest, tl.ceil(tl.max(logits, axis=1)))
    shrink = power_of_two(largest - new_largest)
    weights = tl.exp2(logits - new_largest[:, None])
    steps = tl.sum((weights * _WEIGHT_STEPS + 0.5).to(tl.int32), axis=1)
    weight_sum = weight_sum * shrink + steps.to(tl.float32) * (1.0 / _WEIGHT_STEPS)
    sums *= shrink[:, None]  # exact, and so is the product in the fma
    if S.layer.v.dynamic:
        v_scales = _load_scales(scales, table, kv_head, start, first, end, S, S.layer.v)
        weights *= v_scales[None, :]
        up, down = _scale_of(tl.max(weights, axis=1))
        added = tl.zeros([S.rows, S.layer.v.tile], tl.float32)
        added = _weigh(weights * down[:, None], stored_v, added, S)
        sums = tl.fma(added, tl.broadcast_to(up[:, None], added.shape), sums)
    else:
        sums = _weigh(weights, stored_v, sums, S)
    return new_largest, weight_sum, sums


@triton.jit
def attend_partition(
    q: tl.tuple,
    factor: tl.tensor,
    row_position: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    k_codes: tl.tensor,
    v_codes: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    partition: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    S: tl.constexpr,
    PARTITION: tl.constexpr,
) -> tl.tuple:
    """Keys `first` to `end` as far as they lie in a partition.

    Returns:
        largest: `[rows]`, the largest logit in powers of two, rounded up.
        weight_sum: `[rows]`, the sum of `2^(logit - largest)`.
        sums: `[rows, channels]`, the sum of those weights times V's codes and dynamic scales.
    """
    largest = tl.full([S.rows], NO_LOGIT, tl.float32)
    weight_sum = tl.zeros([S.rows], tl.float32)
    sums = tl.zeros([S.rows, S.layer.v.tile], tl.float32)
    begin = tl.maximum(partition * (PARTITION // S.tokens), first // S.tokens)
    stop = tl.cdiv(tl.minimum((partition + 1) * PARTITION, end), S.tokens)
    for tile in tl.range(begin, stop):
        largest, weight_sum, sums = _add_tile(
            q,
            factor,
            row_position,
            window,
            softcap,
            k_codes,
            v_codes,
            scales,
            table,
            kv_head,
            tile * S.tokens,
            first,
            end,
            largest,
            weight_sum,
            sums,
            S,
        )
    return largest, weight_sum, sums


@triton.jit
def logit_factor(
    up: tl.tensor, softmax_scale: tl.tensor, softcap: tl.tensor, S: tl.constexpr
) -> tl.tensor:
    """What turns a sum of products into a logit in powers of two, or into tanh's argument."""
    if S.softcap:
        return up * (softmax_scale * S.k_unit / softcap)
    else:
        return up * (softmax_scale * S.k_unit * LOG2_E)
