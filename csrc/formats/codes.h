// Codes from numbers, one IEEE operation at a time: the C++ side of
// src/tightkv/formats/quantization.py. Compile with -ffp-contract=off. Plain loops over these
// functions vectorize.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "layout.h"

namespace tightkv {
namespace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Round to nearest even; |x| must not exceed the type's largest value.
template <int kExponentBits, int kMantissaBits>
inline uint32_t encode_minifloat(float x) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr int kDropped = 23 - kMantissaBits;
  const uint32_t sign = bits_of(x) >> 31 << (kExponentBits + kMantissaBits);
  const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  const uint32_t odd = magnitude >> kDropped & 1;
  const uint32_t normal = ((magnitude + (1u << (kDropped - 1)) - 1 + odd) >> kDropped) -
                          (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
  if constexpr (kBias == 127) {
    return sign | normal;  // bfloat16 has float32's exponents, subnormal ones too
  } else {
    // Adding 1.5 * 2^23 units of the smallest step rounds to a whole number of them.
    const float step = from_bits(static_cast<uint32_t>(127 + 1 - kBias - kMantissaBits) << 23);
    const float shifter = step * 12582912.0f;
    const uint32_t subnormal = bits_of(from_bits(magnitude) + shifter) - bits_of(shifter);
    const uint32_t smallest_normal = static_cast<uint32_t>(127 + 1 - kBias) << 23;
    return sign | (magnitude < smallest_normal ? subnormal : normal);
  }
}

template <int kExponentBits, int kMantissaBits>
inline float decode_minifloat(uint32_t code) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  const uint32_t sign = code >> (kExponentBits + kMantissaBits) << 31;
  const uint32_t magnitude = code & ((1u << (kExponentBits + kMantissaBits)) - 1);
  // As a float32 with a far too small exponent (a subnormal one where the code's is), then scaled.
  const float tiny = from_bits(magnitude << (23 - kMantissaBits));
  const float scale = from_bits(static_cast<uint32_t>(254 - kBias) << 23);
  return from_bits(sign | bits_of(tiny * scale));
}

// What a code type stores, and its range; docs/formats.md has the table.
template <Code>
struct CodeTraits;

template <>
struct CodeTraits<Code::kFloat32> {
  using Stored = float;
  static constexpr float kMax = 3.40282346638528859812e+38f;
  static constexpr float kClipAt = INFINITY;
  static Stored encode(float x) { return x; }
};

template <>
struct CodeTraits<Code::kFloat16> {
  using Stored = uint16_t;
  static constexpr float kMax = 65504.0f;
  static constexpr float kClipAt = 65520.0f;
  static Stored encode(float x) { return static_cast<Stored>(encode_minifloat<5, 10>(x)); }
};

template <>
struct CodeTraits<Code::kBFloat16> {
  using Stored = uint16_t;
  static constexpr float kMax = 3.38953138925153547590e+38f;
  static constexpr float kClipAt = 3.39617752923046005620e+38f;
  static Stored encode(float x) { return static_cast<Stored>(encode_minifloat<8, 7>(x)); }
};

template <>
struct CodeTraits<Code::kInt8> {
  using Stored = int8_t;
  static constexpr float kMax = 127.0f;
  static constexpr float kClipAt = 127.5f;
  static Stored encode(float x) { return static_cast<Stored>(static_cast<int32_t>(rintf(x))); }
};

template <>
struct CodeTraits<Code::kFp8E4M3> {
  using Stored = uint8_t;
  static constexpr float kMax = 448.0f;
  static constexpr float kClipAt = 464.0f;
  static Stored encode(float x) { return static_cast<Stored>(encode_minifloat<4, 3>(x)); }
};

template <>
struct CodeTraits<Code::kFp8E5M2> {
  using Stored = uint8_t;
  static constexpr float kMax = 57344.0f;
  static constexpr float kClipAt = 61440.0f;
  static Stored encode(float x) { return static_cast<Stored>(encode_minifloat<5, 2>(x)); }
};

// Dynamic scale: fp16 bits, rounded up so that absmax / scale <= max; 1 where absmax is 0.
inline uint16_t dynamic_scale(float absmax, float max) {
  if (absmax == 0.0f) return 0x3c00;
  float scale = absmax / max;
  scale = scale < 6.103515625e-05f ? 6.103515625e-05f : scale;  // 2^-14, smallest normal fp16
  scale = scale > 65504.0f ? 65504.0f : scale;
  return static_cast<uint16_t>(((bits_of(scale) + 0x1fff) >> 13) - ((127 - 15) << 10));
}

}  // namespace
}  // namespace tightkv
