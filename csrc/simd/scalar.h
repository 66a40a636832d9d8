// The vocabulary of the kernels in plain C++: 16 lanes of float32, of int32, and of int16 pairs.
// The other headers of this folder say the same words with intrinsics.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/codes.h"
#include "simd/inline.h"

namespace tightkv {
namespace {

struct Simd {
  static constexpr const char* kName = "scalar";
  static constexpr int kMaxRows = 4;  // rows of accumulators that fit into the registers
  static constexpr float kE4M3Unit = 1.0f;

  struct Float {
    float lane[16];
  };
  struct Int {
    int32_t lane[16];
  };
  struct Pairs {
    int16_t lane[32];
  };

  template <class F>
  TIGHTKV_INLINE static Float each(F f) {
    Float r;
    for (int i = 0; i < 16; ++i) r.lane[i] = f(i);
    return r;
  }

  TIGHTKV_INLINE static Float zero() {
    return each([](int) { return 0.0f; });
  }
  TIGHTKV_INLINE static Float broadcast(float x) {
    return each([=](int) { return x; });
  }
  TIGHTKV_INLINE static Float load(const float* p) {
    return each([=](int i) { return p[i]; });
  }
  TIGHTKV_INLINE static void store(float* p, const Float& x) {
    for (int i = 0; i < 16; ++i) p[i] = x.lane[i];
  }
  TIGHTKV_INLINE static Float load_half(const uint16_t* p) {
    return each([=](int i) { return decode_minifloat<5, 10>(p[i]); });
  }
  TIGHTKV_INLINE static Float load_bfloat16(const uint16_t* p) {
    return each([=](int i) { return from_bits(static_cast<uint32_t>(p[i]) << 16); });
  }
  // E4M3 divided by kE4M3Unit: its bits in a wider format whose exponent has another bias. The
  // caller folds the unit into a factor it multiplies by anyway.
  TIGHTKV_INLINE static Float load_e4m3_over_unit(const uint8_t* p) {
    return each([=](int i) { return decode_minifloat<4, 3>(p[i]); });
  }
  TIGHTKV_INLINE static Float load_e5m2(const uint8_t* p) {
    return each([=](int i) { return decode_minifloat<5, 2>(p[i]); });
  }

  TIGHTKV_INLINE static Float add(const Float& a, const Float& b) {
    return each([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  TIGHTKV_INLINE static Float sub(const Float& a, const Float& b) {
    return each([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  TIGHTKV_INLINE static Float mul(const Float& a, const Float& b) {
    return each([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  TIGHTKV_INLINE static Float div(const Float& a, const Float& b) {
    return each([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  TIGHTKV_INLINE static Float max(const Float& a, const Float& b) {
    return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  TIGHTKV_INLINE static Float fma(const Float& a, const Float& b, const Float& c) {
    return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }
  TIGHTKV_INLINE static Float abs(const Float& a) {
    return each([&](int i) { return a.lane[i] < 0.0f ? -a.lane[i] : a.lane[i]; });
  }
  // `a` where x < bound, else `b`.
  TIGHTKV_INLINE static Float select_below(const Float& x, float bound, const Float& a,
                                           const Float& b) {
    return each([&](int i) { return x.lane[i] < bound ? a.lane[i] : b.lane[i]; });
  }
  // 2^n, and 0 for n = -127, where the lowest 8 bits of t are n + 127.
  TIGHTKV_INLINE static Float exp2_biased(const Float& t) {
    return each([&](int i) { return from_bits(bits_of(t.lane[i]) << 23); });
  }
  // `a` in lanes [from, to), `b` elsewhere.
  TIGHTKV_INLINE static Float select_lanes(int from, int to, const Float& a, const Float& b) {
    return each([&](int i) { return i >= from && i < to ? a.lane[i] : b.lane[i]; });
  }
  TIGHTKV_INLINE static float reduce_max(const Float& a) {
    float m = a.lane[0];
    for (int i = 1; i < 16; ++i) m = a.lane[i] > m ? a.lane[i] : m;
    return m;
  }
  TIGHTKV_INLINE static float reduce_add(const Float& a) {
    float s = 0.0f;
    for (int i = 0; i < 16; ++i) s += a.lane[i];
    return s;
  }

  TIGHTKV_INLINE static Int zero_int() { return Int{}; }
  TIGHTKV_INLINE static Float to_float(const Int& a) {
    return each([&](int i) { return static_cast<float>(a.lane[i]); });
  }
  TIGHTKV_INLINE static Pairs load_int8(const int8_t* p) {
    Pairs r;
    for (int i = 0; i < 32; ++i) r.lane[i] = p[i];
    return r;
  }
  TIGHTKV_INLINE static Pairs load_int16(const int16_t* p) {
    Pairs r;
    for (int i = 0; i < 32; ++i) r.lane[i] = p[i];
    return r;
  }
  TIGHTKV_INLINE static void store_pairs(int16_t* p, const Pairs& a) {
    for (int i = 0; i < 32; ++i) p[i] = a.lane[i];
  }
  // acc += a.even * pair.low + a.odd * pair.high, in each lane.
  TIGHTKV_INLINE static Int multiply_add(const Int& acc, const Pairs& a, int32_t pair) {
    const int32_t low = static_cast<int16_t>(pair & 0xffff), high = pair >> 16;
    Int r;
    for (int i = 0; i < 16; ++i)
      r.lane[i] = acc.lane[i] + a.lane[2 * i] * low + a.lane[2 * i + 1] * high;
    return r;
  }
  // Nearest whole numbers, as int16.
  TIGHTKV_INLINE static void store_rounded(int16_t* p, const Float& a) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int16_t>(rintf(a.lane[i]));
  }
};

}  // namespace
}  // namespace tightkv
