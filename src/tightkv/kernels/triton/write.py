"""The kernel that quantizes K and V of new tokens and stores them."""

from __future__ import annotations

import triton
import triton.language as tl

from tightkv.kernels.triton.codes import dynamic_scale, encode

__all__ = ["LAUNCH_OPTIONS", "TOKENS", "write_kernel"]

TOKENS = 16
"""Tokens that one program stores, of one KV head."""

# Without fusion: a product and a sum are two roundings in the formula of a code.
LAUNCH_OPTIONS: dict[str, int | bool] = {"num_warps": 4, "enable_fp_fusion": False}
"""How the kernel is compiled."""


@triton.jit
def _write_tensor(
    x: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    static: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    clip_count: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    slot: tl.tensor,
    written: tl.tensor,
    block_size: tl.constexpr,
    T: tl.constexpr,
    IS_K: tl.constexpr,
) -> tl.tensor:
    """K or V of some tokens of one head; returns which of them are not finite."""
    channel = tl.arange(0, max(T.tile, 16))[None, :]
    read = written[:, None] & (channel < T.size)
    at = token[:, None].to(tl.int64) * token_stride + head * head_stride + channel
    y = tl.load(x + at, mask=read, other=0.0).to(tl.float32)
    finite = (y.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    y = tl.where(finite, y, 0.0)
    if T.static:
        factor = tl.load(static + head * T.size + channel, mask=channel < T.size, other=1.0)
        y = tl.div_rn(y, tl.broadcast_to(factor, y.shape))
    block = slot // block_size
    in_block = (slot % block_size).to(tl.int32)
    if T.dynamic:
        half, scale = dynamic_scale(tl.max(tl.abs(y), axis=1), T)
        y = tl.div_rn(y, tl.broadcast_to(scale[:, None], y.shape))
        at_scale = block * T.scale_block + T.scale_offset + head * block_size + in_block
        tl.store(scales + at_scale, half, mask=written)
    clipped = tl.sum(tl.sum((tl.abs(y) >= T.clip_at).to(tl.int32), axis=1), axis=0)
    tl.atomic_add(clip_count, clipped.to(tl.int64), mask=clipped > 0, sem="relaxed")
    lane = in_block[:, None] % 16
    if IS_K:
        inner = (channel // T.interleave * 16 + lane) * T.interleave + channel % T.interleave
    else:
        inner = channel // 16 * 256 + channel % 16 * T.interleave
        inner += lane // T.interleave * (16 * T.interleave) + lane % T.interleave
    base = (block * T.block + T.offset + head * T.head) * (T.interleave * T.pack)
    base += in_block // 16 * (16 * T.stored)
    stored = written[:, None] & (channel < T.stored)
    tl.store(codes + (base[:, None] + inner), encode(y, T), mask=stored)
    return tl.max((~finite).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["num_tokens"])
def write_kernel(
    key: tl.tensor,
    value: tl.tensor,
    slot_mapping: tl.tensor,
    k_static: tl.tensor,
    v_static: tl.tensor,
    k_codes: tl.tensor,
    v_codes: tl.tensor,
    scales: tl.tensor,
    clip_counts: tl.tensor,
    bad_tokens: tl.tensor,
    num_tokens: tl.tensor,
    num_slots: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    L: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Store `TOKENS` tokens of one KV head. Grid: `(num_tokens / TOKENS, num_kv_heads)`."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    written = (slot >= 0) & (slot < num_slots)
    slot = tl.where(written, slot, 0)
    k_bad = _write_tensor(
        key,
        key_token,
        key_head,
        k_static,
        k_codes,
        scales,
        clip_counts,
        token,
        head,
        slot,
        written,
        L.block_size,
        L.k,
        True,
    )
    v_bad = _write_tensor(
        value,
        value_token,
        value_head,
        v_static,
        v_codes,
        scales,
        clip_counts + 1,
        token,
        head,
        slot,
        written,
        L.block_size,
        L.v,
        False,
    )
    bad = written & ((k_bad | v_bad) != 0)
    # Programs of other heads may store the same 1.
    tl.store(bad_tokens + token, tl.full([TOKENS], 1, tl.uint8), mask=bad)
