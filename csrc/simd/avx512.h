// 16 lanes as one 512-bit register (AVX-512 F, BW, DQ, VL; VNNI where the compiler is told to). The
// words are those of scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/inline.h"

namespace tightkv {
namespace {

struct Simd {
#ifdef __AVX512VNNI__
  static constexpr const char* kName = "avx512_vnni";
#else
  static constexpr const char* kName = "avx512";
#endif
  static constexpr int kMaxRows = 12;
  static constexpr float kE4M3Unit = 0x1p120f;

  using Float = __m512;
  using Int = __m512i;
  using Pairs = __m512i;

  TIGHTKV_INLINE static Float zero() { return _mm512_setzero_ps(); }
  TIGHTKV_INLINE static Float broadcast(float x) { return _mm512_set1_ps(x); }
  TIGHTKV_INLINE static Float load(const float* p) { return _mm512_loadu_ps(p); }
  TIGHTKV_INLINE static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  TIGHTKV_INLINE static __m128i load_16_bytes(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
  }
  TIGHTKV_INLINE static __m256i load_32_bytes(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  TIGHTKV_INLINE static Float load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(load_32_bytes(p));
  }
  TIGHTKV_INLINE static Float load_bfloat16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32_bytes(p)), 16));
  }
  TIGHTKV_INLINE static Float load_e4m3_over_unit(const uint8_t* p) {
    const __m512i x = _mm512_slli_epi32(_mm512_cvtepi8_epi32(load_16_bytes(p)), 20);
    return _mm512_castsi512_ps(
        _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0x87f00000u))));
  }
  TIGHTKV_INLINE static Float load_e5m2(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_16_bytes(p)), 8));
  }

  TIGHTKV_INLINE static Float add(Float x, Float y) { return _mm512_add_ps(x, y); }
  TIGHTKV_INLINE static Float sub(Float x, Float y) { return _mm512_sub_ps(x, y); }
  TIGHTKV_INLINE static Float mul(Float x, Float y) { return _mm512_mul_ps(x, y); }
  TIGHTKV_INLINE static Float div(Float x, Float y) { return _mm512_div_ps(x, y); }
  TIGHTKV_INLINE static Float max(Float x, Float y) { return _mm512_max_ps(x, y); }
  TIGHTKV_INLINE static Float fma(Float x, Float y, Float z) { return _mm512_fmadd_ps(x, y, z); }
  TIGHTKV_INLINE static Float abs(Float x) { return _mm512_abs_ps(x); }
  TIGHTKV_INLINE static Float select_below(Float x, float bound, Float y, Float z) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_LT_OQ), z, y);
  }
  TIGHTKV_INLINE static Float exp2_biased(Float t) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23));
  }
  TIGHTKV_INLINE static Float select_lanes(int from, int to, Float x, Float y) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 inside = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(from)) &
                             _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(to));
    return _mm512_mask_blend_ps(inside, y, x);
  }
  TIGHTKV_INLINE static float reduce_max(Float x) { return _mm512_reduce_max_ps(x); }
  TIGHTKV_INLINE static float reduce_add(Float x) { return _mm512_reduce_add_ps(x); }

  TIGHTKV_INLINE static Int zero_int() { return _mm512_setzero_si512(); }
  TIGHTKV_INLINE static Float to_float(Int x) { return _mm512_cvtepi32_ps(x); }
  TIGHTKV_INLINE static Pairs load_int8(const int8_t* p) {
    return _mm512_cvtepi8_epi16(load_32_bytes(p));
  }
  TIGHTKV_INLINE static Pairs load_int16(const int16_t* p) { return _mm512_loadu_si512(p); }
  TIGHTKV_INLINE static void store_pairs(int16_t* p, Pairs x) { _mm512_storeu_si512(p, x); }
  TIGHTKV_INLINE static Int multiply_add(Int acc, Pairs x, int32_t pair) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(acc, x, _mm512_set1_epi32(pair));
#else
    return _mm512_add_epi32(acc, _mm512_madd_epi16(x, _mm512_set1_epi32(pair)));
#endif
  }
  TIGHTKV_INLINE static void store_rounded(int16_t* p, Float x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
  }
};

}  // namespace
}  // namespace tightkv
