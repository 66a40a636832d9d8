"""A decoder layer in one call, against the kernels that it is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cache_cases import ISAS, new_cache, tensor_format
from tightkv.errors import KernelError
from tightkv.formats import BlockLayout
from tightkv.kernels import (
    AttentionBatch,
    AttentionParams,
    CpuBackend,
    DecoderLayerWeights,
    LayerStep,
    WeightPanels,
    paged_attention,
    reshape_and_cache,
)

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 48, 80, 6, 2, 16
WIDTH = (HEADS + 2 * KV_HEADS) * SIZE
NUM_TOKENS = 20
PARAMS = AttentionParams(softmax_scale=0.25, sliding_window=9)
ROWS = torch.tensor([4, 18, 19])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


NORMS = [(1 + random(size), 1e-5) for size in (HIDDEN, HIDDEN, SIZE, SIZE)]
PRODUCTS = [
    (WeightPanels(random(WIDTH, HIDDEN)), random(WIDTH)),
    (WeightPanels(random(HIDDEN, HEADS * SIZE)), None),
    (WeightPanels(random(2 * INNER, HIDDEN)), None),
    (WeightPanels(random(HIDDEN, INNER)), random(HIDDEN)),
]


def weights(num_heads: int = HEADS) -> DecoderLayerWeights:
    qkv, o_proj, gate_up, down_proj = PRODUCTS
    return DecoderLayerWeights(
        qkv=qkv,
        o_proj=o_proj,
        gate_up=gate_up,
        down_proj=down_proj,
        before_attention=NORMS[0],
        before_mlp=NORMS[1],
        of_query=NORMS[2],
        of_key=NORMS[3],
        num_heads=num_heads,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        params=PARAMS,
    )


def make_step(num_kv_heads: int = KV_HEADS) -> LayerStep:
    """Two sequences, of 5 and of 15 tokens, in blocks 1 and 3."""
    int8 = tensor_format("int8+dynamic")
    cache = new_cache(BlockLayout(int8, int8, num_kv_heads, SIZE, SIZE, 16), num_blocks=4)
    slots = [*range(16, 21), *range(48, 63)]
    return LayerStep(
        cache=cache,
        batch=batch_of(5, 15),
        slot_mapping=torch.tensor(slots),
        clip_counts=torch.zeros(2, dtype=torch.int64),
        bad_tokens=torch.zeros(NUM_TOKENS, dtype=torch.bool),
    )


def batch_of(*num_queries: int) -> AttentionBatch:
    starts = torch.tensor([0, num_queries[0], sum(num_queries)], dtype=torch.int32)
    tables = torch.tensor([[1], [3]], dtype=torch.int32)
    return AttentionBatch(starts, torch.tensor([5, 15], dtype=torch.int32), tables)


def in_pieces(backend: CpuBackend, hidden: torch.Tensor, step: LayerStep) -> torch.Tensor:
    (qkv, qkv_bias), (o_proj, _), (gate_up, _), (down_proj, down_bias) = PRODUCTS
    before, after, of_query, of_key = NORMS

    def norm_rows(x: torch.Tensor, norm: tuple[torch.Tensor, float]) -> torch.Tensor:
        return backend.rms_norm(x[:, None], *norm)[:, 0]

    joined = backend.linear(norm_rows(hidden, before), qkv, qkv_bias).view(len(hidden), -1, SIZE)
    query, key, value = joined.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1)
    query, key = backend.rms_norm(query, *of_query), backend.rms_norm(key, *of_key)
    for rotated in (query, key):
        backend.rotate(rotated, COS, SIN)
    reshape_and_cache(
        backend, step.cache, key, value, step.slot_mapping, step.clip_counts, step.bad_tokens
    )
    attended = paged_attention(backend, query, step.cache, step.batch, PARAMS)
    hidden = backend.linear(attended.view(len(hidden), -1), o_proj, None, hidden)
    gated = backend.silu_and_mul(backend.linear(norm_rows(hidden, after), gate_up))
    return backend.linear(gated, down_proj, down_bias, hidden)


X = random(NUM_TOKENS, HIDDEN)
COS, SIN = random(NUM_TOKENS, SIZE).cos(), random(NUM_TOKENS, SIZE).sin()


@pytest.mark.parametrize("isa", ISAS)
def test_the_bits_of_its_pieces(isa: str) -> None:
    backend = CpuBackend(isa)
    expected, again, of_rows = make_step(), make_step(), make_step()
    wanted = in_pieces(backend, X, expected)
    assert torch.equal(backend.decoder_layer(weights(), X.clone(), COS, SIN, again), wanted)
    rows_only = replace(of_rows, rows=ROWS, batch=batch_of(1, 2))
    assert torch.equal(
        backend.decoder_layer(weights(), X.clone(), COS, SIN, rows_only), wanted[ROWS]
    )
    for step in (again, of_rows):
        assert torch.equal(step.cache.blocks, expected.cache.blocks)


def test_no_row_comes_out_and_all_is_written() -> None:
    backend = CpuBackend(ISAS[0])
    all_rows, none = make_step(), make_step()
    backend.decoder_layer(weights(), X.clone(), COS, SIN, all_rows)
    nothing = replace(none, rows=torch.zeros(0, dtype=torch.int64), batch=batch_of(0, 0))
    assert backend.decoder_layer(weights(), X.clone(), COS, SIN, nothing).shape == (0, HIDDEN)
    assert torch.equal(none.cache.blocks, all_rows.cache.blocks)


def test_bad_tokens_are_marked() -> None:
    step, x = make_step(), X.clone()
    x[7, 3] = float("nan")
    CpuBackend(ISAS[0]).decoder_layer(weights(), x, COS, SIN, step)
    assert step.bad_tokens.nonzero().flatten().tolist() == [7]


def test_what_does_not_fit_is_refused() -> None:
    backend, step = CpuBackend(ISAS[0]), make_step()

    def run(step: LayerStep, x: torch.Tensor = X) -> None:
        backend.decoder_layer(weights(), x.clone(), COS, SIN, step)

    with pytest.raises(KernelError, match="products of the layer do not fit"):
        weights(num_heads=HEADS + 1)
    with pytest.raises(KernelError, match="hidden has shape"):
        run(step, X[:, :-1].contiguous())
    with pytest.raises(KernelError, match="other heads"):
        run(make_step(num_kv_heads=KV_HEADS + 1))
    with pytest.raises(KernelError, match="outside the cache"):
        run(replace(step, slot_mapping=step.slot_mapping + 100))
    with pytest.raises(KernelError, match="number of queries"):
        run(replace(step, rows=ROWS))
    with pytest.raises(KernelError, match="no token of the step"):
        run(replace(step, rows=ROWS + 1, batch=batch_of(1, 2)))
