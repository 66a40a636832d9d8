// reshape_and_cache: quantize K and V of each token and scatter the codes into their tile.
#pragma once

#include "formats/codes.h"
#include "kernels/kernels.h"

namespace tightkv {
namespace {

// x / static, with NaN and Inf as 0. Returns the largest magnitude's bits; sets `bad`.
inline uint32_t prepare(const float* x, const float* scale, int size, float* y, bool* bad) {
  uint32_t largest_input = 0, largest = 0;
  for (int c = 0; c < size; ++c) {
    const uint32_t magnitude = bits_of(x[c]) & 0x7fffffffu;
    largest_input = magnitude > largest_input ? magnitude : largest_input;
    y[c] = magnitude >= 0x7f800000u ? 0.0f : x[c];
  }
  *bad |= largest_input >= 0x7f800000u;
  if (scale != nullptr)
    for (int c = 0; c < size; ++c) y[c] = y[c] / scale[c];
  for (int c = 0; c < size; ++c) {
    const uint32_t magnitude = bits_of(y[c]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// Out of the way of heads that do not clip.
[[gnu::noinline, gnu::cold]] int64_t count_clipped(const float* y, int size, float clip_at) {
  int32_t clipped = 0;
  for (int c = 0; c < size; ++c) clipped += fabsf(y[c]) >= clip_at;
  return clipped;
}

template <Code kCode>
void encode_all(const float* y, int size, typename CodeTraits<kCode>::Stored* codes) {
  using Traits = CodeTraits<kCode>;
  for (int c = 0; c < size; ++c) {
    float x = y[c] < -Traits::kMax ? -Traits::kMax : y[c];
    x = x > Traits::kMax ? Traits::kMax : x;
    codes[c] = Traits::encode(x);
  }
}

template <Code kCode, int (*kIndex)(int, int, int)>
int64_t write_head(const float* x, const float* scale, const TensorLayout& tensor, uint8_t* tile,
                   uint16_t* dynamic, int token, bool* bad) {
  using Traits = CodeTraits<kCode>;
  alignas(64) float y[kMaxHeadSize];
  alignas(64) typename Traits::Stored codes[kMaxHeadSize];
  uint32_t largest = prepare(x, scale, tensor.size, y, bad);
  if (tensor.dynamic) {
    const uint16_t half = dynamic_scale(from_bits(largest), Traits::kMax);
    const float step = decode_minifloat<5, 10>(half);
    for (int c = 0; c < tensor.size; ++c) y[c] = y[c] / step;
    largest = bits_of(from_bits(largest) / step);
    dynamic[token] = half;
  }
  // The largest is known anyway: counting costs nothing where nothing clips.
  int64_t clipped = 0;
  if (largest >= bits_of(Traits::kClipAt)) [[unlikely]]
    clipped = count_clipped(y, tensor.size, Traits::kClipAt);
  encode_all<kCode>(y, tensor.size, codes);
  auto* stored = reinterpret_cast<typename Traits::Stored*>(tile);
  for (int c = 0; c < tensor.size; ++c) stored[kIndex(c, token, interleave(kCode))] = codes[c];
  for (int c = tensor.size; c < tensor.padded_size; ++c)
    stored[kIndex(c, token, interleave(kCode))] = 0;
  return clipped;
}

template <int (*kIndex)(int, int, int)>
int64_t write_tensor(const Strided& x, const float* scale, const WriteArgs& args,
                     const TensorLayout& tensor, int64_t token) {
  const int64_t slot = args.slot_mapping[token];
  const int64_t block = slot / args.layout.block_size;
  const int in_block = static_cast<int>(slot % args.layout.block_size);
  const int tile = in_block / kTile, lane = in_block % kTile;
  int64_t clipped = 0;
  for (int head = 0; head < args.layout.num_kv_heads; ++head) {
    const float* row = x.at(token, head);
    const float* factors = scale == nullptr ? nullptr : scale + int64_t{head} * tensor.size;
    uint8_t* codes = args.layout.codes(args.blocks, tensor, block, head, tile);
    uint16_t* dynamic =
        tensor.dynamic ? args.layout.scales(args.blocks, tensor, block, head, tile) : nullptr;
    bool* bad = args.bad_tokens + token;
    const auto write = [&](auto write_one) {
      clipped += write_one(row, factors, tensor, codes, dynamic, lane, bad);
    };
    switch (tensor.code) {
      case Code::kFloat32: write(write_head<Code::kFloat32, kIndex>); break;
      case Code::kFloat16: write(write_head<Code::kFloat16, kIndex>); break;
      case Code::kBFloat16: write(write_head<Code::kBFloat16, kIndex>); break;
      case Code::kInt8: write(write_head<Code::kInt8, kIndex>); break;
      case Code::kFp8E4M3: write(write_head<Code::kFp8E4M3, kIndex>); break;
      case Code::kFp8E5M2: write(write_head<Code::kFp8E5M2, kIndex>); break;
    }
  }
  return clipped;
}

inline ClipCounts write_tokens(const WriteArgs& args, int64_t begin, int64_t end) {
  ClipCounts counts{0, 0};
  for (int64_t token = begin; token < end; ++token) {
    counts.k += write_tensor<k_index>(args.key, args.k_scale, args, args.layout.k, token);
    counts.v += write_tensor<v_index>(args.value, args.v_scale, args, args.layout.v, token);
  }
  return counts;
}

}  // namespace
}  // namespace tightkv
