"""The attention kernels: prompts in tiles, decodes in partitions of keys, and their reduction.

What makes a row's bits the same alone, in any batch, in prefill and in decode:

- keys are taken in tiles and partitions at fixed positions of the sequence;
- the largest logit, to which weights are relative, is rounded up to a whole number, so that
  changing it multiplies by a power of two, which is exact;
- the sum of the weights is made in integers, whose order does not matter;
- sums of products come from the same instruction with the same order of keys, whatever the number
  of rows (`shapes.py` keeps tiles below the size from which another instruction is taken).
"""

# Triton compiles what follows a return, too, unless it stands in an else.
# ruff: noqa: RET505

from __future__ import annotations

import triton
import triton.language as tl

from tightkv.kernels.triton.partition import (
    LOG2_E,
    NO_LOGIT,
    attend_partition,
    load_query,
    logit_factor,
    power_of_two,
)

__all__ = ["REDUCE_OPTIONS", "decode_kernel", "prefill_kernel", "reduce_kernel"]

REDUCE_OPTIONS: dict[str, int | bool] = {"num_warps": 1, "enable_fp_fusion": False}
"""How `reduce_kernel` is compiled; `shapes.launch_options` has the others'."""


@triton.jit
def _first_sum(sinks: tl.tensor, head: tl.tensor, valid: tl.tensor, S: tl.constexpr) -> tl.tuple:
    """Largest logit and sum of weights before the first key: those of the sink, if any."""
    if S.sinks:
        logit = tl.load(sinks + head, mask=valid, other=0.0) * LOG2_E
        largest = tl.maximum(tl.ceil(logit), NO_LOGIT)  # of a sink of -inf, too
        return largest, tl.exp2(logit - largest)
    else:
        return tl.full(head.shape, NO_LOGIT, tl.float32), tl.zeros(head.shape, tl.float32)


@triton.jit
def _store_rows(
    out: tl.tensor,
    at: tl.tensor,
    valid: tl.tensor,
    finite: tl.tensor,
    weight_sum: tl.tensor,
    sums: tl.tensor,
    static: tl.tensor,
    kv_head: tl.tensor,
    S: tl.constexpr,
) -> None:
    """Divide by the sum of weights, multiply with V's static factors, store."""
    V: tl.constexpr = S.layer.v
    channel = tl.arange(0, V.tile)[None, :]
    inside = channel < V.size
    divisor = tl.where(weight_sum > 0.0, weight_sum, 1.0)
    result = tl.div_rn(sums * S.v_unit, tl.broadcast_to(divisor[:, None], sums.shape))
    if V.static:
        result *= tl.load(static + kv_head * V.size + channel, mask=inside, other=1.0)
    result = tl.where(finite[:, None], result, float("nan"))
    tl.store(out + (at[:, None] + channel), result, mask=valid[:, None] & inside)


@triton.jit
def _sequence_of(
    query_start_loc: tl.tensor, num_seqs: tl.tensor, tile: tl.tensor, QUERIES: tl.constexpr
) -> tl.tensor:
    """To which sequence a tile belongs, when sequence i has tiles from `start_i / QUERIES + i` on.

    That leaves each sequence room for all its queries, whatever their number.
    """
    low = num_seqs * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(query_start_loc + middle) // QUERIES + middle
        if begin <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_seqs", "min_queries", "window", "table_width"])
def prefill_kernel(
    query: tl.tensor,
    out: tl.tensor,
    k_codes: tl.tensor,
    v_codes: tl.tensor,
    scales: tl.tensor,
    k_static: tl.tensor,
    v_static: tl.tensor,
    sinks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    table_width: tl.tensor,
    num_seqs: tl.tensor,
    min_queries: tl.tensor,
    query_token: tl.tensor,
    query_head: tl.tensor,
    num_heads: tl.tensor,
    softmax_scale: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    S: tl.constexpr,
    PARTITION: tl.constexpr,
) -> None:
    """A tile of queries over all its keys, for sequences with `min_queries` or more.

    Grid: `(num_tokens / queries of a tile + num_seqs, num_kv_heads * head_tiles)`.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1) // S.head_tiles
    seq = _sequence_of(query_start_loc, num_seqs, tile, S.queries)
    seq_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - seq_start
    first_query = (tile - (seq_start // S.queries + seq)) * S.queries
    if (first_query >= query_len) | (query_len < min_queries):
        return
    row = tl.arange(0, S.rows)
    local_query = first_query + row // S.head_rows
    in_group = tl.program_id(1) % S.head_tiles * S.head_rows + row % S.head_rows
    head = kv_head * S.group + in_group
    valid = (local_query < query_len) & (in_group < S.group)
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - query_len
    row_position = tl.where(valid, context + local_query, -1)
    token = (seq_start + local_query).to(tl.int64)
    q, up, finite = load_query(
        query, token * query_token + head * query_head, valid, k_static, kv_head, S
    )
    factor = logit_factor(up, softmax_scale, softcap, S)
    first = 0
    if S.window:
        first = tl.maximum(context + first_query - window + 1, 0)
    end = tl.minimum(context + first_query + S.queries, seq_len)
    table = block_table + seq.to(tl.int64) * table_width
    largest, weight_sum = _first_sum(sinks, head, valid, S)
    total = tl.zeros([S.rows, S.layer.v.tile], tl.float32)
    for partition in tl.range(first // PARTITION, tl.cdiv(end, PARTITION)):
        part_largest, part_weights, part_sums = attend_partition(
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
            partition,
            first,
            end,
            S,
            PARTITION,
        )
        new_largest = tl.maximum(largest, part_largest)
        shrink = power_of_two(largest - new_largest)
        part_shrink = power_of_two(part_largest - new_largest)
        weight_sum = weight_sum * shrink + part_weights * part_shrink
        total = total * shrink[:, None] + part_sums * part_shrink[:, None]
        largest = new_largest
    at = (token * num_heads + head) * S.layer.v.size
    _store_rows(out, at, valid, finite, weight_sum, total, v_static, kv_head, S)


@triton.jit(do_not_specialize=["first_seq", "window", "table_width", "num_partitions"])
def decode_kernel(
    query: tl.tensor,
    part_sums: tl.tensor,
    part_weights: tl.tensor,
    k_codes: tl.tensor,
    v_codes: tl.tensor,
    scales: tl.tensor,
    k_static: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    table_width: tl.tensor,
    first_seq: tl.tensor,
    num_partitions: tl.tensor,
    query_token: tl.tensor,
    query_head: tl.tensor,
    num_heads: tl.tensor,
    softmax_scale: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    S: tl.constexpr,
    PARTITION: tl.constexpr,
) -> None:
    """Every so many partitions of the keys of a sequence with one query.

    Grid: `(num_seqs, num_kv_heads * head_tiles, programs that share the partitions)`.
    """
    row_of_scratch = tl.program_id(0)
    seq = first_seq + row_of_scratch
    kv_head = tl.program_id(1) // S.head_tiles
    token = tl.load(query_start_loc + seq)
    if tl.load(query_start_loc + seq + 1) - token != 1:
        return
    row = tl.arange(0, S.rows)
    in_group = tl.program_id(1) % S.head_tiles * S.head_rows + row
    head = kv_head * S.group + in_group
    valid = (row < S.head_rows) & (in_group < S.group)
    end = tl.load(seq_lens + seq)
    row_position = tl.where(valid, end - 1, -1)
    at_query = token.to(tl.int64) * query_token + head * query_head
    q, up, finite = load_query(query, at_query, valid, k_static, kv_head, S)
    factor = logit_factor(up, softmax_scale, softcap, S)
    first = 0
    if S.window:
        first = tl.maximum(end - window, 0)
    table = block_table + seq.to(tl.int64) * table_width
    channel = tl.arange(0, S.layer.v.tile)[None, :]
    begin = first // PARTITION + tl.program_id(2)
    for partition in tl.range(begin, tl.cdiv(end, PARTITION), tl.num_programs(2)):
        largest, weight_sum, sums = attend_partition(
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
            partition,
            first,
            end,
            S,
            PARTITION,
        )
        at = (row_of_scratch.to(tl.int64) * num_heads + head) * num_partitions + partition
        tl.store(part_weights + at * 2, largest, mask=valid)
        weight_sum = tl.where(finite, weight_sum, float("nan"))
        tl.store(part_weights + at * 2 + 1, weight_sum, mask=valid)
        tl.store(part_sums + (at[:, None] * S.layer.v.tile + channel), sums, mask=valid[:, None])


@triton.jit(do_not_specialize=["first_seq", "window", "num_partitions"])
def reduce_kernel(
    part_sums: tl.tensor,
    part_weights: tl.tensor,
    out: tl.tensor,
    v_static: tl.tensor,
    sinks: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    first_seq: tl.tensor,
    num_partitions: tl.tensor,
    num_heads: tl.tensor,
    window: tl.tensor,
    S: tl.constexpr,
    PARTITION: tl.constexpr,
) -> None:
    """Fold the partitions of a sequence with one query, in order. Grid: `(num_seqs, num_heads)`."""
    row_of_scratch = tl.program_id(0)
    seq = first_seq + row_of_scratch
    token = tl.load(query_start_loc + seq)
    if tl.load(query_start_loc + seq + 1) - token != 1:
        return
    head = tl.program_id(1) + tl.zeros([1], tl.int32)
    kv_head = tl.program_id(1) // S.group
    valid = head < num_heads
    end = tl.load(seq_lens + seq)
    first = 0
    if S.window:
        first = tl.maximum(end - window, 0)
    row = (row_of_scratch.to(tl.int64) * num_heads + tl.program_id(1)) * num_partitions
    largest, weight_sum = _first_sum(sinks, head, valid, S)
    begin, stop = first // PARTITION, tl.cdiv(end, PARTITION)
    for chunk in tl.range(begin, stop, 64):
        partition = chunk + tl.arange(0, 64)
        logits = tl.load(
            part_weights + (row + partition) * 2, mask=partition < stop, other=NO_LOGIT
        )
        largest = tl.maximum(largest, tl.max(logits, axis=0))
    weight_sum *= power_of_two(_first_sum(sinks, head, valid, S)[0] - largest)
    channel = tl.arange(0, S.layer.v.tile)[None, :]
    total = tl.zeros([1, S.layer.v.tile], tl.float32)
    # The loads wait for nothing but each other, so that several are on their way.
    for partition in tl.range(begin, stop, loop_unroll_factor=8):
        at = row + partition
        shrink = power_of_two(tl.load(part_weights + at * 2) - largest)
        weight_sum += tl.load(part_weights + at * 2 + 1) * shrink
        total += tl.load(part_sums + (at * S.layer.v.tile + channel)) * shrink[:, None]
    at_out = (token.to(tl.int64) * num_heads + head) * S.layer.v.size
    _store_rows(
        out, at_out, valid, weight_sum == weight_sum, weight_sum, total, v_static, kv_head, S
    )
