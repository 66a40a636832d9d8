// Products of rows with panels: 16 lanes wide, as deep as the sum.
//
// Float codes are widened to float32. Integer codes are multiplied as int16 by integers of 16 bits,
// and summed in int32, exactly.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/kernels.h"
#include "simd/inline.h"

namespace tightkv {
namespace {

// ---- sources: how the codes of a panel become factors of a product ----

template <class S, Code kCode>
struct FloatSource {
  using Accumulator = typename S::Float;
  using Factor = float;
  using Widened = float;
  static constexpr int kDepthPerStep = 1;
  static constexpr int kStepsPerFetch = 4;  // at least one cache line; more would spill registers
  static constexpr int kBytesPerStep = kTile * code_bytes(kCode);
  // What the product must still be multiplied by (see load_e4m3_over_unit).
  static constexpr float kUnit = kCode == Code::kFp8E4M3 ? S::kE4M3Unit : 1.0f;

  TIGHTKV_INLINE static auto load(const uint8_t* panel, int step) {
    const auto at = [&](auto* p) {
      return reinterpret_cast<decltype(p)>(panel) + int64_t{step} * kTile;
    };
    if constexpr (kCode == Code::kFloat32) return S::load(at(static_cast<const float*>(nullptr)));
    if constexpr (kCode == Code::kFloat16)
      return S::load_half(at(static_cast<const uint16_t*>(nullptr)));
    if constexpr (kCode == Code::kBFloat16)
      return S::load_bfloat16(at(static_cast<const uint16_t*>(nullptr)));
    if constexpr (kCode == Code::kFp8E4M3)
      return S::load_e4m3_over_unit(at(static_cast<const uint8_t*>(nullptr)));
    if constexpr (kCode == Code::kFp8E5M2)
      return S::load_e5m2(at(static_cast<const uint8_t*>(nullptr)));
  }
  TIGHTKV_INLINE static Accumulator zero() { return S::zero(); }
  TIGHTKV_INLINE static Accumulator multiply_add(const Accumulator& sum, const typename S::Float& x,
                                                 float factor) {
    return S::fma(x, S::broadcast(factor), sum);
  }
  TIGHTKV_INLINE static typename S::Float to_float(const Accumulator& sum) { return sum; }
  TIGHTKV_INLINE static void widen(const uint8_t* panel, int step, Widened* out) {
    S::store(out + int64_t{step} * kTile, load(panel, step));
  }
};

template <class S, class Stored>
struct IntSource {
  using Accumulator = typename S::Int;
  using Factor = int32_t;  // two int16
  using Widened = int16_t;
  static constexpr int kDepthPerStep = 2;
  static constexpr int kStepsPerFetch = 8;
  static constexpr int kBytesPerStep = 2 * kTile * sizeof(Stored);
  static constexpr float kUnit = 1.0f;

  TIGHTKV_INLINE static typename S::Pairs load(const uint8_t* panel, int step) {
    const auto* p = reinterpret_cast<const Stored*>(panel) + int64_t{step} * 2 * kTile;
    if constexpr (sizeof(Stored) == 1) return S::load_int8(p);
    if constexpr (sizeof(Stored) == 2) return S::load_int16(p);
  }
  TIGHTKV_INLINE static Accumulator zero() { return S::zero_int(); }
  TIGHTKV_INLINE static Accumulator multiply_add(const Accumulator& sum, const typename S::Pairs& x,
                                                 int32_t factor) {
    return S::multiply_add(sum, x, factor);
  }
  TIGHTKV_INLINE static typename S::Float to_float(const Accumulator& sum) {
    return S::to_float(sum);
  }
  TIGHTKV_INLINE static void widen(const uint8_t* panel, int step, Widened* out) {
    S::store_pairs(out + int64_t{step} * 2 * kTile, load(panel, step));
  }
};

template <class S, Code kCode>
struct SourceOf {
  using Type = FloatSource<S, kCode>;
  using Wide = FloatSource<S, Code::kFloat32>;
};
template <class S>
struct SourceOf<S, Code::kInt8> {
  using Type = IntSource<S, int8_t>;
  using Wide = IntSource<S, int16_t>;
};

// ---- products ----

// f(0), f(1), ... f(kCount - 1), each with its index as a constant: what a loop would keep in
// memory stays in registers.
template <int kCount, class F>
TIGHTKV_INLINE void unrolled(F f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) TIGHTKV_INLINE_LAMBDA {
    (f(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Fetches from memory into the second-level cache, which can wait for more lines than the first.
TIGHTKV_INLINE void fetch_line(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

// Panels of a product: sums run over `num_panels`, and there are `num_outputs` of them. Of K, a
// panel per output, a tile of tokens each. Of V and of a weight, the outputs, tiles of channels,
// lie one after the other behind a pointer; V has one per tile of tokens.
struct PanelGrid {
  const uint8_t* const* panels;
  const uint8_t* const* fetch;  // the same: what to fetch meanwhile, as long as the panel
  int num_panels;
  int num_outputs;
  int pointers_per_output;  // 1: K, 0: V and weights
  int64_t output_bytes;     // from output to output behind the same pointer
  // Of the groups of steps, each `fetch_every`th fetches, from this one on: where panels are read
  // several times, each pass fetches its share, and memory is not idle in the others.
  int fetch_every = 1, first_fetch = 0;
};

template <class Source>
struct Factors {
  const typename Source::Factor* first;  // [rows][num_panels * steps]
  int64_t stride;                        // from row to row
  int steps;                             // per panel
};

struct Output {
  float* first;    // [rows][num_outputs * 16]
  int64_t stride;  // from row to row
};

// out[r][j][lane] = sum over panels p and steps k of factors[r][p][k] * panels[p][j][k][lane],
// for kWide neighbouring j, from `begin` on up to `end`. The order of each sum is always the same.
// kSteps: steps per panel, if the caller knows, else 0.
template <class S, class Source, int kSteps, int kRows, int kWide>
void panel_product(PanelGrid grid, int begin, int end, Factors<Source> factors, Output out) {
  constexpr int kUnroll = Source::kStepsPerFetch;
  constexpr int kBytes = kUnroll * Source::kBytesPerStep;
  const int steps = kSteps > 0 ? kSteps : factors.steps;
  int until_fetch = grid.first_fetch;
  for (int j = begin; j < end; j += kWide) {
    typename Source::Accumulator sum[kRows * kWide];
    unrolled<kRows * kWide>([&](auto i) TIGHTKV_INLINE_LAMBDA { sum[i] = Source::zero(); });
    const uint8_t* const* panels = grid.panels + j * grid.pointers_per_output;
    const uint8_t* const* fetches = grid.fetch + j * grid.pointers_per_output;
    const int64_t offset = j * grid.output_bytes;
    const typename Source::Factor* factor[kRows];
    unrolled<kRows>([&](auto r)
                        TIGHTKV_INLINE_LAMBDA { factor[r] = factors.first + r * factors.stride; });
    int p = 0;
    do {
      const uint8_t *panel[kWide], *fetch[kWide];
      unrolled<kWide>([&](auto w) TIGHTKV_INLINE_LAMBDA {
        panel[w] = panels[w * grid.pointers_per_output] + offset + w * grid.output_bytes;
        fetch[w] = fetches[w * grid.pointers_per_output] + offset + w * grid.output_bytes;
      });
      const auto add_step = [&](int k) TIGHTKV_INLINE_LAMBDA {
        unrolled<kWide>([&](auto w) TIGHTKV_INLINE_LAMBDA {
          const auto x = Source::load(panel[w], k);
          unrolled<kRows>([&](auto r) TIGHTKV_INLINE_LAMBDA {
            constexpr int i = r * kWide + w;
            sum[i] = Source::multiply_add(sum[i], x, factor[r][k]);
          });
        });
      };
      int k = 0;
      for (; k + kUnroll <= steps; k += kUnroll) {
        if (until_fetch-- == 0) {
          until_fetch = grid.fetch_every - 1;
          unrolled<kWide * kBytes / 64>([&](auto i) TIGHTKV_INLINE_LAMBDA {
            fetch_line(fetch[i % kWide] + k * Source::kBytesPerStep + i / kWide * 64);
          });
        }
        unrolled<kUnroll>([&](auto step) TIGHTKV_INLINE_LAMBDA { add_step(k + step); });
      }
      if constexpr (kSteps % kUnroll != 0 || kSteps == 0)
        for (; k < steps; ++k) add_step(k);
      unrolled<kRows>([&](auto r) TIGHTKV_INLINE_LAMBDA { factor[r] += steps; });
      ++panels, ++fetches;
    } while (++p < grid.num_panels);
    unrolled<kRows * kWide>([&](auto i) TIGHTKV_INLINE_LAMBDA {
      S::store(out.first + i / kWide * out.stride + (j + i % kWide) * kTile,
               Source::to_float(sum[i]));
    });
  }
}

template <class S, class Source, int kSteps, int kRows = 1>
void product_of_rows(int rows, const PanelGrid& grid, const Factors<Source>& factors,
                     const Output& out) {
  if constexpr (kRows <= S::kMaxRows) {
    if (rows != kRows)
      return product_of_rows<S, Source, kSteps, kRows + 1>(rows, grid, factors, out);
    // Few rows leave registers free for neighbours, which share the loads of the factors.
    constexpr int kRoom = S::kMaxRows * 2 / 3;
    constexpr int kWide = kRows * 4 <= kRoom ? 4 : kRows * 2 <= kRoom ? 2 : 1;
    const int whole = grid.num_outputs - grid.num_outputs % kWide;
    panel_product<S, Source, kSteps, kRows, kWide>(grid, 0, whole, factors, out);
    if constexpr (kWide > 1)
      panel_product<S, Source, kSteps, kRows, 1>(grid, whole, grid.num_outputs, factors, out);
  }
}

// The same for any number of rows. With more rows than fit into the registers, the panels are
// widened once into `scratch` and read from there, unless they are float32 already. kDepth: values
// per panel, or 0.
template <class S, Code kCode, int kDepth>
void product(int rows, const PanelGrid& grid, int depth, const float* factors, int64_t stride,
             const Output& out, float* scratch) {
  using Source = typename SourceOf<S, kCode>::Type;
  using Wide = typename SourceOf<S, kCode>::Wide;
  constexpr int kSteps = kDepth / Source::kDepthPerStep;
  const auto* factor = reinterpret_cast<const typename Source::Factor*>(factors);
  const int steps = depth / Source::kDepthPerStep;
  if (rows <= S::kMaxRows)
    return product_of_rows<S, Source, kSteps>(rows, grid, {factor, stride, steps}, out);
  auto* wide = reinterpret_cast<typename Source::Widened*>(scratch);
  const uint8_t *wide_panels[kTilesPerChunk], *fetch[kTilesPerChunk];
  const int passes = (rows + S::kMaxRows - 1) / S::kMaxRows;
  for (int j = 0; j < grid.num_outputs; ++j) {
    for (int p = 0; p < grid.num_panels; ++p) {
      const uint8_t* from = grid.panels[p + j * grid.pointers_per_output] + j * grid.output_bytes;
      wide_panels[p] = from;
      fetch[p] = grid.fetch[p + j * grid.pointers_per_output] + j * grid.output_bytes;
      if constexpr (!std::is_same_v<Source, Wide>) {
        auto* panel = wide + int64_t{p} * depth * kTile;
        for (int k = 0; k < steps; ++k) Source::widen(from, k, panel);
        wide_panels[p] = reinterpret_cast<const uint8_t*>(panel);
      }
    }
    for (int pass = 0, row = 0; pass < passes; ++pass) {
      const int count = (rows - row + passes - pass - 1) / (passes - pass);
      product_of_rows<S, Wide, kSteps>(count,
                                       {wide_panels, fetch, grid.num_panels, 1, 0, 0, passes, pass},
                                       {factor + row * stride, stride, steps},
                                       {out.first + row * out.stride + j * kTile, out.stride});
      row += count;
    }
  }
}

template <class F>
void with_code(Code code, F f) {
  switch (code) {
    case Code::kFloat32: return f(std::integral_constant<Code, Code::kFloat32>{});
    case Code::kFloat16: return f(std::integral_constant<Code, Code::kFloat16>{});
    case Code::kBFloat16: return f(std::integral_constant<Code, Code::kBFloat16>{});
    case Code::kInt8: return f(std::integral_constant<Code, Code::kInt8>{});
    case Code::kFp8E4M3: return f(std::integral_constant<Code, Code::kFp8E4M3>{});
    case Code::kFp8E5M2: return f(std::integral_constant<Code, Code::kFp8E5M2>{});
  }
}

constexpr bool is_integer(Code code) { return code == Code::kInt8; }

}  // namespace
}  // namespace tightkv
