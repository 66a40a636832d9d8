// 2^x and what is made of it, 16 lanes at a time.
#pragma once

#include "simd/inline.h"

namespace tightkv {
namespace {

constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x below 100, exactly 0 below -127 and for NaN; a minimax polynomial, 1.5 ulp.
template <class S>
TIGHTKV_INLINE typename S::Float exp2(typename S::Float x) {
  using F = typename S::Float;
  // Added to a small number it leaves the whole part in the lowest bits, with the exponent's bias.
  const F magic = S::broadcast(12582912.0f + 127.0f);
  const F clamped = S::max(x, S::broadcast(-127.0f));
  const F biased = S::add(clamped, magic);
  const F r = S::sub(clamped, S::sub(biased, magic));
  F p = S::broadcast(1.326472614891827e-3f);
  p = S::fma(p, r, S::broadcast(9.671512991189957e-3f));
  p = S::fma(p, r, S::broadcast(5.550733581185341e-2f));
  p = S::fma(p, r, S::broadcast(2.4022242426872253e-1f));
  p = S::fma(p, r, S::broadcast(6.931470036506653e-1f));
  p = S::fma(p, r, S::broadcast(1.0f));
  return S::mul(p, S::exp2_biased(biased));
}

template <class S>
TIGHTKV_INLINE typename S::Float tanh(typename S::Float x) {
  using F = typename S::Float;
  const F one = S::broadcast(1.0f);
  const F e = exp2<S>(S::mul(S::abs(x), S::broadcast(-2.0f * kLog2E)));
  const F y = S::div(S::sub(one, e), S::add(one, e));
  return S::select_below(x, 0.0f, S::sub(S::zero(), y), y);
}

template <class S>
float exp2_of(float x) {
  alignas(64) float lanes[16];
  S::store(lanes, exp2<S>(S::broadcast(x)));
  return lanes[0];
}

}  // namespace
}  // namespace tightkv
