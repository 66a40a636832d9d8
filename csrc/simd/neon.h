// 16 lanes as four 128-bit registers (AArch64 NEON). The words are those of scalar.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "simd/inline.h"

namespace tightkv {
namespace {

struct Simd {
  static constexpr const char* kName = "neon";
  static constexpr int kMaxRows = 4;
  static constexpr float kE4M3Unit = 256.0f;

  struct Float {
    float32x4_t r[4];
  };
  struct Int {
    int32x4_t r[4];
  };
  struct Pairs {
    int16x8_t r[4];
  };

  template <class F>
  TIGHTKV_INLINE static Float each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
  }

  TIGHTKV_INLINE static Float zero() { return broadcast(0.0f); }
  TIGHTKV_INLINE static Float broadcast(float x) {
    return each([=](int) { return vdupq_n_f32(x); });
  }
  TIGHTKV_INLINE static Float load(const float* p) {
    return each([=](int i) { return vld1q_f32(p + 4 * i); });
  }
  TIGHTKV_INLINE static void store(float* p, const Float& x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.r[i]);
  }
  TIGHTKV_INLINE static Float from_half_bits(uint16x8_t low, uint16x8_t high) {
    const float16x8_t a = vreinterpretq_f16_u16(low), b = vreinterpretq_f16_u16(high);
    return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)),
             vcvt_high_f32_f16(b)}};
  }
  TIGHTKV_INLINE static Float load_half(const uint16_t* p) {
    return from_half_bits(vld1q_u16(p), vld1q_u16(p + 8));
  }
  TIGHTKV_INLINE static Float load_bfloat16(const uint16_t* p) {
    return each([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
  }
  TIGHTKV_INLINE static uint16x8_t e4m3_bits(uint8x8_t x) {
    const int16x8_t shifted = vshlq_n_s16(vmovl_s8(vreinterpret_s8_u8(x)), 7);
    return vandq_u16(vreinterpretq_u16_s16(shifted), vdupq_n_u16(0xbfff));
  }
  TIGHTKV_INLINE static Float load_e4m3_over_unit(const uint8_t* p) {
    return from_half_bits(e4m3_bits(vld1_u8(p)), e4m3_bits(vld1_u8(p + 8)));
  }
  TIGHTKV_INLINE static Float load_e5m2(const uint8_t* p) {
    return from_half_bits(vshlq_n_u16(vmovl_u8(vld1_u8(p)), 8),
                          vshlq_n_u16(vmovl_u8(vld1_u8(p + 8)), 8));
  }

  TIGHTKV_INLINE static Float add(const Float& x, const Float& y) {
    return each([&](int i) { return vaddq_f32(x.r[i], y.r[i]); });
  }
  TIGHTKV_INLINE static Float sub(const Float& x, const Float& y) {
    return each([&](int i) { return vsubq_f32(x.r[i], y.r[i]); });
  }
  TIGHTKV_INLINE static Float mul(const Float& x, const Float& y) {
    return each([&](int i) { return vmulq_f32(x.r[i], y.r[i]); });
  }
  TIGHTKV_INLINE static Float div(const Float& x, const Float& y) {
    return each([&](int i) { return vdivq_f32(x.r[i], y.r[i]); });
  }
  TIGHTKV_INLINE static Float max(const Float& x, const Float& y) {
    return each([&](int i) { return vmaxnmq_f32(x.r[i], y.r[i]); });
  }
  TIGHTKV_INLINE static Float fma(const Float& x, const Float& y, const Float& z) {
    return each([&](int i) { return vfmaq_f32(z.r[i], x.r[i], y.r[i]); });
  }
  TIGHTKV_INLINE static Float abs(const Float& x) {
    return each([&](int i) { return vabsq_f32(x.r[i]); });
  }
  TIGHTKV_INLINE static Float select_below(const Float& x, float bound, const Float& y,
                                           const Float& z) {
    const float32x4_t limit = vdupq_n_f32(bound);
    return each([&](int i) { return vbslq_f32(vcltq_f32(x.r[i], limit), y.r[i], z.r[i]); });
  }
  TIGHTKV_INLINE static Float exp2_biased(const Float& t) {
    return each([&](int i) {
      return vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(t.r[i]), 23));
    });
  }
  TIGHTKV_INLINE static Float select_lanes(int from, int to, const Float& x, const Float& y) {
    static const int32_t kLanes[4] = {0, 1, 2, 3};
    const int32x4_t first = vld1q_s32(kLanes);
    return each([&](int i) {
      const int32x4_t lane = vaddq_s32(first, vdupq_n_s32(4 * i));
      const uint32x4_t inside =
          vandq_u32(vcgeq_s32(lane, vdupq_n_s32(from)), vcltq_s32(lane, vdupq_n_s32(to)));
      return vbslq_f32(inside, x.r[i], y.r[i]);
    });
  }
  TIGHTKV_INLINE static float reduce_max(const Float& x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.r[0], x.r[1]), vmaxq_f32(x.r[2], x.r[3])));
  }
  TIGHTKV_INLINE static float reduce_add(const Float& x) {
    return vaddvq_f32(vaddq_f32(vaddq_f32(x.r[0], x.r[1]), vaddq_f32(x.r[2], x.r[3])));
  }

  TIGHTKV_INLINE static Int zero_int() {
    const int32x4_t zero = vdupq_n_s32(0);
    return {{zero, zero, zero, zero}};
  }
  TIGHTKV_INLINE static Float to_float(const Int& x) {
    return each([&](int i) { return vcvtq_f32_s32(x.r[i]); });
  }
  TIGHTKV_INLINE static Pairs load_int8(const int8_t* p) {
    const int8x16_t a = vld1q_s8(p), b = vld1q_s8(p + 16);
    return {
        {vmovl_s8(vget_low_s8(a)), vmovl_high_s8(a), vmovl_s8(vget_low_s8(b)), vmovl_high_s8(b)}};
  }
  TIGHTKV_INLINE static Pairs load_int16(const int16_t* p) {
    return {{vld1q_s16(p), vld1q_s16(p + 8), vld1q_s16(p + 16), vld1q_s16(p + 24)}};
  }
  TIGHTKV_INLINE static void store_pairs(int16_t* p, const Pairs& x) {
    for (int i = 0; i < 4; ++i) vst1q_s16(p + 8 * i, x.r[i]);
  }
  TIGHTKV_INLINE static Int multiply_add(const Int& acc, const Pairs& x, int32_t pair) {
    const int16x8_t y = vreinterpretq_s16_s32(vdupq_n_s32(pair));
    Int r;
    for (int i = 0; i < 4; ++i) {
      const int32x4_t low = vmull_s16(vget_low_s16(x.r[i]), vget_low_s16(y));
      r.r[i] = vaddq_s32(acc.r[i], vpaddq_s32(low, vmull_high_s16(x.r[i], y)));
    }
    return r;
  }
  TIGHTKV_INLINE static void store_rounded(int16_t* p, const Float& x) {
    for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vqmovn_s32(vcvtnq_s32_f32(x.r[i])));
  }
};

}  // namespace
}  // namespace tightkv
