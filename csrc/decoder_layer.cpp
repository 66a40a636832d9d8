#include "decoder_layer.h"

#include <algorithm>
#include <utility>

#include "scratch.h"

namespace tightkv {
namespace {

// Between two products; each is used for what fits into it.
thread_local Scratch narrow, wide, queries, residual, after_attention;

void multiply(const KernelTable& kernels, const Linear& linear, const float* x, const float* other,
              float* out, int64_t num_rows, int num_threads) {
  run_linear(kernels,
             {linear.code, linear.weight, x, linear.in_features, linear.bias, other, out,
              linear.in_features, linear.out_features},
             num_rows, num_threads);
}

void normalize(const KernelTable& kernels, const RmsNorm& norm, StridedOf<float> x,
               StridedOf<float> out, int64_t num_tokens, int num_heads, int size, int num_threads) {
  run_rms_norm(
      kernels,
      {{x.data, x.token_stride, x.head_stride}, out, num_heads, size, norm.weight, norm.epsilon},
      num_tokens, num_threads);
}

void normalize_rows(const KernelTable& kernels, const RmsNorm& norm, const float* x, float* out,
                    int64_t num_rows, int size, int num_threads) {
  run_rms_norm(kernels, {{x, size, size}, {out, size, size}, 1, size, norm.weight, norm.epsilon},
               num_rows, num_threads);
}

const float* gather(const float* from, int64_t stride, const LayerStep& step, int64_t size,
                    Scratch* scratch) {
  float* out = scratch->get(step.num_rows * size);
  for (int64_t row = 0; row < step.num_rows; ++row)
    std::copy_n(from + step.rows[row] * stride, size, out + row * size);
  return out;
}

}  // namespace

ClipCounts run_decoder_layer(const KernelTable& kernels, const DecoderLayer& layer,
                             const LayerCache& cache, const LayerStep& step, int num_threads) {
  const int64_t tokens = step.num_tokens, rows = step.num_rows;
  const int hidden = layer.hidden_size(), size = layer.head_size;
  const int inner = layer.down_proj.in_features, width = layer.qkv.out_features;
  const int query_width = layer.num_heads * size;
  float* normed = narrow.get(std::max(tokens * hidden, rows * std::max(query_width, inner)));
  float* joined = wide.get(std::max(tokens * width, rows * 2 * inner));

  normalize_rows(kernels, layer.before_attention, step.hidden, normed, tokens, hidden, num_threads);
  multiply(kernels, layer.qkv, normed, nullptr, joined, tokens, num_threads);
  const StridedOf<float> query{joined, width, size};
  const StridedOf<float> key{joined + query_width, width, size};
  const Strided value{key.data + layer.num_kv_heads * size, width, size};
  const auto norm_heads = [&](const RmsNorm& norm, StridedOf<float> x, int num_heads) {
    if (norm.weight != nullptr)
      normalize(kernels, norm, x, x, tokens, num_heads, size, num_threads);
  };
  norm_heads(layer.of_query, query, layer.num_heads);
  norm_heads(layer.of_key, key, layer.num_kv_heads);
  for (const auto& [x, num_heads] :
       {std::pair{query, layer.num_heads}, std::pair{key, layer.num_kv_heads}})
    run_rotary_embedding(kernels, {x, num_heads, size, step.cos, step.sin}, tokens, num_threads);
  const ClipCounts clipped = run_write(kernels,
                                       {cache.layout,
                                        cache.blocks,
                                        {key.data, width, size},
                                        value,
                                        cache.k_scale,
                                        cache.v_scale,
                                        step.slot_mapping,
                                        step.bad_tokens},
                                       tokens, num_threads);
  if (rows == 0) return clipped;

  Strided asking{query.data, width, size};
  const float* before = step.hidden;
  if (step.rows != nullptr) {
    asking = {gather(query.data, width, step, query_width, &queries), query_width, size};
    before = gather(step.hidden, hidden, step, hidden, &residual);
  }
  float* attention = normed;  // what was there has been multiplied
  run_attention(kernels,
                {cache.layout, cache.blocks, asking, cache.k_scale, cache.v_scale, attention,
                 layer.num_heads, layer.softmax_scale, layer.sliding_window, 0.0f, nullptr},
                step.batch, num_threads);
  float* between = after_attention.get(rows * hidden);
  multiply(kernels, layer.o_proj, attention, before, between, rows, num_threads);
  normalize_rows(kernels, layer.before_mlp, between, normed, rows, hidden, num_threads);
  multiply(kernels, layer.gate_up, normed, nullptr, joined, rows, num_threads);
  run_silu_and_mul(kernels, {joined, normed, inner}, rows, num_threads);
  multiply(kernels, layer.down_proj, normed, between, step.out, rows, num_threads);
  return clipped;
}

}  // namespace tightkv
