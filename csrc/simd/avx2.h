// 16 lanes as two 256-bit registers (AVX2, FMA, F16C; AVX-VNNI where the compiler is told to). The
// words are those of scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/inline.h"

namespace tightkv {
namespace {

struct Simd {
#ifdef __AVXVNNI__
  static constexpr const char* kName = "avx_vnni";
#else
  static constexpr const char* kName = "avx2";
#endif
  static constexpr int kMaxRows = 6;
  static constexpr float kE4M3Unit = 0x1p120f;

  struct Float {
    __m256 a, b;
  };
  struct Int {
    __m256i a, b;
  };
  struct Pairs {
    __m256i a, b;
  };

  TIGHTKV_INLINE static Float zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  TIGHTKV_INLINE static Float broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  TIGHTKV_INLINE static Float load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  }
  TIGHTKV_INLINE static void store(float* p, Float x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  TIGHTKV_INLINE static Float load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  }
  TIGHTKV_INLINE static __m256 widen_bfloat16(const uint16_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  TIGHTKV_INLINE static Float load_bfloat16(const uint16_t* p) {
    return {widen_bfloat16(p), widen_bfloat16(p + 8)};
  }
  TIGHTKV_INLINE static Float from_half_bits(__m256i x) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
  }
  // s.eeee.mmm, shifted so that eeee ends a float32's exponent, and the sign's copies cleared
  // from the rest of it: a bias of 127 where 7 is meant. Subnormal codes become subnormal floats.
  TIGHTKV_INLINE static __m256 widen_e4m3(const uint8_t* p) {
    const __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0x87f00000u));
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(x, 20), mask));
  }
  TIGHTKV_INLINE static Float load_e4m3_over_unit(const uint8_t* p) {
    return {widen_e4m3(p), widen_e4m3(p + 8)};
  }
  TIGHTKV_INLINE static Float load_e5m2(const uint8_t* p) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return from_half_bits(_mm256_slli_epi16(x, 8));
  }

  TIGHTKV_INLINE static Float add(Float x, Float y) {
    return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
  }
  TIGHTKV_INLINE static Float sub(Float x, Float y) {
    return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
  }
  TIGHTKV_INLINE static Float mul(Float x, Float y) {
    return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
  }
  TIGHTKV_INLINE static Float div(Float x, Float y) {
    return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
  }
  TIGHTKV_INLINE static Float max(Float x, Float y) {
    return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
  }
  TIGHTKV_INLINE static Float fma(Float x, Float y, Float z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  TIGHTKV_INLINE static Float abs(Float x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
  }
  TIGHTKV_INLINE static Float select_below(Float x, float bound, Float y, Float z) {
    const __m256 limit = _mm256_set1_ps(bound);
    return {_mm256_blendv_ps(z.a, y.a, _mm256_cmp_ps(x.a, limit, _CMP_LT_OQ)),
            _mm256_blendv_ps(z.b, y.b, _mm256_cmp_ps(x.b, limit, _CMP_LT_OQ))};
  }
  TIGHTKV_INLINE static __m256 exp2_biased(__m256 t) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23));
  }
  TIGHTKV_INLINE static Float exp2_biased(Float t) { return {exp2_biased(t.a), exp2_biased(t.b)}; }
  TIGHTKV_INLINE static __m256 lanes_from(int from, int to, __m256i lane) {
    const __m256i inside = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(from - 1)),
                                            _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane));
    return _mm256_castsi256_ps(inside);
  }
  TIGHTKV_INLINE static Float select_lanes(int from, int to, Float x, Float y) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_blendv_ps(y.a, x.a, lanes_from(from, to, lane)),
            _mm256_blendv_ps(y.b, x.b, lanes_from(from - 8, to - 8, lane))};
  }
  TIGHTKV_INLINE static float reduce_max(Float x) {
    const __m256 m = _mm256_max_ps(x.a, x.b);
    __m128 r = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    r = _mm_max_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_max_ss(r, _mm_movehdup_ps(r)));
  }
  TIGHTKV_INLINE static float reduce_add(Float x) {
    const __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 r = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    r = _mm_add_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_add_ss(r, _mm_movehdup_ps(r)));
  }

  TIGHTKV_INLINE static Int zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  TIGHTKV_INLINE static Float to_float(Int x) {
    return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
  }
  TIGHTKV_INLINE static Pairs load_int8(const int8_t* p) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
  }
  TIGHTKV_INLINE static Pairs load_int16(const int16_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
  }
  TIGHTKV_INLINE static void store_pairs(int16_t* p, Pairs x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), x.b);
  }
  TIGHTKV_INLINE static Int multiply_add(Int acc, Pairs x, int32_t pair) {
    const __m256i y = _mm256_set1_epi32(pair);
#ifdef __AVXVNNI__
    return {_mm256_dpwssd_avx_epi32(acc.a, x.a, y), _mm256_dpwssd_avx_epi32(acc.b, x.b, y)};
#else
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, y)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, y))};
#endif
  }
  TIGHTKV_INLINE static void store_rounded(int16_t* p, Float x) {
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)));
  }
};

}  // namespace
}  // namespace tightkv
