// What a decoder layer does between its products: RMSNorm, RoPE, SiLU. Each token by itself.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels/exp2.h"
#include "kernels/kernels.h"

namespace tightkv {
namespace {

template <class S>
float sum_of_squares(const float* x, int size) {
  typename S::Float lanes = S::zero();
  int c = 0;
  for (; c + 16 <= size; c += 16) {
    const typename S::Float y = S::load(x + c);
    lanes = S::fma(y, y, lanes);
  }
  float sum = S::reduce_add(lanes);
  for (; c < size; ++c) sum += x[c] * x[c];
  return sum;
}

inline void rms_norm_tokens(const RmsNormArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token)
    for (int head = 0; head < args.num_heads; ++head) {
      const float* x = args.x.at(token, head);
      float* out = args.out.at(token, head);
      const float mean = sum_of_squares<Simd>(x, args.size) / static_cast<float>(args.size);
      const float inverse = 1.0f / sqrtf(mean + args.epsilon);
      for (int c = 0; c < args.size; ++c) out[c] = args.weight[c] * (x[c] * inverse);
    }
}

inline void rotate_tokens(const RotaryArgs& args, int64_t begin, int64_t end) {
  const int half = args.size / 2;
  for (int64_t token = begin; token < end; ++token) {
    const float *cos = args.cos + token * args.size, *sin = args.sin + token * args.size;
    for (int head = 0; head < args.num_heads; ++head) {
      float* low = args.x.at(token, head);
      float* high = low + half;
      for (int c = 0; c < half; ++c) {
        const float a = low[c], b = high[c];
        low[c] = a * cos[c] - b * sin[c];
        high[c] = b * cos[half + c] + a * sin[half + c];
      }
    }
  }
}

// x / (1 + e^-x) * y
template <class S>
TIGHTKV_INLINE typename S::Float silu_times(typename S::Float x, typename S::Float y) {
  const typename S::Float one = S::broadcast(1.0f);
  const typename S::Float e = exp2<S>(S::mul(S::abs(x), S::broadcast(-kLog2E)));
  const typename S::Float top = S::select_below(x, 0.0f, e, one);
  return S::mul(S::mul(x, S::div(top, S::add(one, e))), y);
}

inline void silu_and_mul_tokens(const SiluAndMulArgs& args, int64_t begin, int64_t end) {
  using S = Simd;
  for (int64_t token = begin; token < end; ++token) {
    const float* gate = args.x + token * 2 * args.size;
    const float* up = gate + args.size;
    float* out = args.out + token * args.size;
    int c = 0;
    for (; c + 16 <= args.size; c += 16)
      S::store(out + c, silu_times<S>(S::load(gate + c), S::load(up + c)));
    if (c == args.size) continue;
    float rest[3][16] = {};
    const size_t num_bytes = static_cast<size_t>(args.size - c) * sizeof(float);
    std::memcpy(rest[0], gate + c, num_bytes);
    std::memcpy(rest[1], up + c, num_bytes);
    S::store(rest[2], silu_times<S>(S::load(rest[0]), S::load(rest[1])));
    std::memcpy(out + c, rest[2], num_bytes);
  }
}

}  // namespace
}  // namespace tightkv
