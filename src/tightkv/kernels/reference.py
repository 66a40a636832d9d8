"""The specification of both kernels, in torch: slow, and meant to read like the formula."""

from __future__ import annotations

import torch

from tightkv.formats.base import TensorFormat
from tightkv.formats.layout import TILE, BlockLayout
from tightkv.formats.quantization import dequantize, quantize
from tightkv.kernels.arguments import AttentionBatch, AttentionParams, LayerCache

__all__ = ["paged_attention", "reshape_and_cache"]


def reshape_and_cache(
    cache: LayerCache,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    clip_counts: torch.Tensor,
    bad_tokens: torch.Tensor,
) -> None:
    """See `tightkv.kernels.ops.reshape_and_cache`."""
    layout = cache.layout
    k = quantize(key, layout.k_format, cache.k_scale)
    v = quantize(value, layout.v_format, cache.v_scale)
    clip_counts += torch.stack([k.num_clipped, v.num_clipped])
    bad_tokens |= k.bad_tokens | v.bad_tokens
    block = slot_mapping // layout.block_size
    token = slot_mapping % layout.block_size
    tile, lane = token // TILE, token % TILE

    k_codes = _pad_channels(_as_stored(k.codes), layout.padded_head_size)
    interleave = layout.k_format.code.interleave
    layout.k_codes(cache.blocks)[block, :, tile, :, lane] = k_codes.unflatten(-1, (-1, interleave))

    v_codes = _pad_channels(_as_stored(v.codes), layout.padded_value_size)
    interleave = layout.v_format.code.interleave
    layout.v_codes(cache.blocks)[block, :, tile, :, lane // interleave, :, lane % interleave] = (
        v_codes.unflatten(-1, (-1, TILE))
    )
    for stored, scales in (
        (layout.k_scales(cache.blocks), k.scales),
        (layout.v_scales(cache.blocks), v.scales),
    ):
        if stored is not None and scales is not None:
            stored[block, :, token] = scales


def paged_attention(
    query: torch.Tensor, cache: LayerCache, batch: AttentionBatch, params: AttentionParams
) -> torch.Tensor:
    """See `tightkv.kernels.ops.paged_attention`; computed in float64."""
    outputs = []
    for seq, seq_len in enumerate(batch.seq_lens.tolist()):
        start, end = batch.query_start_loc[seq : seq + 2].tolist()
        k, v = read_sequence(cache, batch.block_table[seq], seq_len)
        # Blocks that no query sees any more may be others'.
        window = params.sliding_window or seq_len
        first = max(0, seq_len - (end - start) - window + 1)
        q, k, v = query[start:end].double(), k[first:].double(), v[first:].double()
        outputs.append(_attend(q, k, v, params))
    return torch.cat(outputs).to(torch.float32)


def read_sequence(
    cache: LayerCache, block_table: torch.Tensor, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence, dequantized, float32 `[seq_len, num_kv_heads, size]`."""
    layout = cache.layout
    blocks = cache.blocks[block_table[: -(-seq_len // layout.block_size)].long()]
    k = _as_codes(read_k(layout, blocks), layout.k_format)[:seq_len, :, : layout.head_size]
    v = _as_codes(read_v(layout, blocks), layout.v_format)[:seq_len, :, : layout.value_size]
    k_scales, v_scales = (
        scales if scales is None else scales.transpose(1, 2).flatten(0, 1)[:seq_len]
        for scales in (layout.k_scales(blocks), layout.v_scales(blocks))
    )
    return dequantize(k, k_scales, cache.k_scale), dequantize(v, v_scales, cache.v_scale)


def read_k(layout: BlockLayout, blocks: torch.Tensor) -> torch.Tensor:
    """K codes of whole blocks in token order, `[num_tokens, num_kv_heads, padded_head_size]`."""
    # [block, head, tile, channel/i, token, i] -> [block, tile, token, head, channel/i, i]
    return layout.k_codes(blocks).permute(0, 2, 4, 1, 3, 5).flatten(4).flatten(0, 2)


def read_v(layout: BlockLayout, blocks: torch.Tensor) -> torch.Tensor:
    """V codes of whole blocks in token order, `[num_tokens, num_kv_heads, padded_value_size]`."""
    # [block, head, tile, channel tile, token/i, channel, i]
    # -> [block, tile, token/i, i, head, channel tile, channel]
    return layout.v_codes(blocks).permute(0, 2, 4, 6, 1, 3, 5).flatten(5).flatten(0, 3)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """`[num_queries, num_heads, value_size]`: the queries are the last ones of the sequence."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * params.softmax_scale
    if params.softcap is not None:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    key_position = torch.arange(len(k))
    query_position = torch.arange(len(k) - len(q), len(k))[:, None]
    visible = key_position <= query_position
    if params.sliding_window is not None:
        visible &= key_position > query_position - params.sliding_window
    logits = logits.masked_fill(~visible, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.double()[:, None, None].expand(-1, len(q), 1)
        logits = torch.cat([logits, sinks], dim=-1)
    probabilities = torch.softmax(logits, dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", probabilities, v)


def _pad_channels(codes: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(codes, (0, size - codes.shape[-1]))


def _as_stored(codes: torch.Tensor) -> torch.Tensor:
    is_float8 = codes.is_floating_point() and codes.itemsize == 1
    return codes.view(torch.uint8) if is_float8 else codes


def _as_codes(stored: torch.Tensor, tensor_format: TensorFormat) -> torch.Tensor:
    return stored.contiguous().view(tensor_format.code.dtype)
