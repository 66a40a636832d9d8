// Paged attention over one chunk of keys for a tile of rows, and the fold over chunks.
//
// A panel is 16 lanes wide: 16 tokens of K (depth: channels) or 16 channels of V (depth: tokens).
// Float codes are widened to float32. Integer codes are multiplied as int16 by queries and
// probabilities rounded to 16 bits, and summed in int32, exactly: 127 * 32,767 * 256 < 2^31.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/exp2.h"
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

// Panels of a product: sums run over `num_panels`, and there are `num_outputs` of them. K: a panel
// per output, a tile of tokens each. V: a panel per tile of tokens, and the outputs, tiles of
// channels, lie one after the other behind its pointer.
struct PanelGrid {
  const uint8_t* const* panels;
  const uint8_t* const* fetch;  // the same: what to fetch meanwhile, as long as the panel
  int num_panels;
  int num_outputs;
  int pointers_per_output;  // 1: K, 0: V
  int64_t output_bytes;     // from output to output behind the same pointer
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
  for (int j = begin; j < end; j += kWide) {
    typename Source::Accumulator sum[kRows * kWide];
    unrolled<kRows * kWide>([&](auto i) TIGHTKV_INLINE_LAMBDA { sum[i] = Source::zero(); });
    const uint8_t* const* panels = grid.panels + j * grid.pointers_per_output;
    const uint8_t* const* fetches = grid.fetch + j * grid.pointers_per_output;
    const int64_t offset = j * grid.output_bytes;
    const typename Source::Factor* factor[kRows];
    unrolled<kRows>([&](auto r) TIGHTKV_INLINE_LAMBDA { factor[r] = factors.first + r * factors.stride; });
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
        unrolled<kWide * kBytes / 64>([&](auto i) TIGHTKV_INLINE_LAMBDA {
          __builtin_prefetch(fetch[i % kWide] + k * Source::kBytesPerStep + i / kWide * 64);
        });
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
// widened once into `scratch` and read from there. kDepth: values per panel, or 0.
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
  const uint8_t* wide_panels[kTilesPerChunk];
  const int passes = (rows + S::kMaxRows - 1) / S::kMaxRows;
  for (int j = 0; j < grid.num_outputs; ++j) {
    for (int p = 0; p < grid.num_panels; ++p) {
      const uint8_t* from = grid.panels[p + j * grid.pointers_per_output] + j * grid.output_bytes;
      auto* panel = wide + int64_t{p} * depth * kTile;
      for (int k = 0; k < steps; ++k) Source::widen(from, k, panel);
      wide_panels[p] = reinterpret_cast<const uint8_t*>(panel);
    }
    for (int pass = 0, row = 0; pass < passes; ++pass) {
      const int count = (rows - row + passes - pass - 1) / (passes - pass);
      product_of_rows<S, Wide, kSteps>(count, {wide_panels, wide_panels, grid.num_panels, 1, 0, 0},
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

inline bool is_integer(Code code) { return code == Code::kInt8; }

// ---- a tile of rows ----

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Pieces of a thread's workspace. All strides in floats; all pieces start on a cache line.
struct Workspace {
  int64_t query_stride, value_stride;
  float *query, *scale, *logits, *weight_step, *weights, *state, *chunk, *k_dynamic, *v_dynamic,
      *scratch;

  Workspace(const AttentionArgs& args, float* memory) {
    const int rows = max_rows(args);
    query_stride = round_up(args.layout.k.padded_size, 16);
    value_stride = args.layout.v.padded_size;
    float** const pieces[] = {&query, &scale, &logits,    &weight_step, &weights,
                              &state, &chunk, &k_dynamic, &v_dynamic,   &scratch};
    const int64_t sizes[] = {rows * query_stride,
                             rows,
                             int64_t{rows} * kChunk,
                             rows,
                             int64_t{rows} * kChunk,
                             state_floats(rows, args.layout.v.padded_size),
                             state_floats(rows, args.layout.v.padded_size),
                             kChunk,
                             kChunk,
                             scratch_floats(args)};
    total = 0;
    for (int i = 0; i < 10; ++i) {
      *pieces[i] = memory + total;
      total += round_up(sizes[i], 16);
    }
  }

  static int max_rows(const AttentionArgs& args) {
    return args.group() > kMaxTileRows ? args.group() : kMaxTileRows;
  }
  static int64_t scratch_floats(const AttentionArgs& args) {
    const int64_t k = int64_t{args.layout.k.padded_size} * kTile;
    const int64_t v = int64_t{kChunk} * kTile;
    return k > v ? k : v;
  }

  int64_t total;
};

struct State {
  float *maximum, *sum, *values;

  State(float* memory, int rows) : maximum(memory), sum(memory + rows), values(memory + 2 * rows) {}
};

template <class S>
class RowTile {
 public:
  RowTile(const AttentionArgs& args, const WorkItem& item, float* partial_states, float* memory)
      : args_(args),
        item_(item),
        partial_(partial_states + item.partial_offset),
        ws_(args, memory),
        rows_(item.num_tokens * args.group()),
        value_size_(args.layout.v.padded_size) {}

  void attend() {
    prepare_queries();
    if (!item_.split) {
      State state(ws_.state, rows_);
      clear(state);
      for (int64_t chunk = item_.chunk_begin; chunk < item_.chunk_end; ++chunk) {
        State part(ws_.chunk, rows_);
        attend_chunk(chunk, part);
        fold(state, part);
      }
      finish(state);
      return;
    }
    float* partial = partial_;
    for (int64_t chunk = item_.chunk_begin; chunk < item_.chunk_end; ++chunk) {
      attend_chunk(chunk, State(partial, rows_));
      partial += state_floats(rows_, value_size_);
    }
  }

  void reduce() {
    prepare_queries();  // for the rows whose query is not finite
    State state(ws_.state, rows_);
    clear(state);
    float* partial = partial_;
    for (int64_t chunk = item_.chunk_begin; chunk < item_.chunk_end; ++chunk) {
      fold(state, State(partial, rows_));
      partial += state_floats(rows_, value_size_);
    }
    finish(state);
  }

 private:
  int head_of(int row) const { return item_.kv_head * args_.group() + row % args_.group(); }
  int64_t token_of(int row) const { return item_.first_token + row / args_.group(); }
  int64_t position_of(int row) const { return item_.first_position + row / args_.group(); }

  // First position that the row sees.
  int64_t first_visible(int row) const {
    const int64_t first = position_of(row) - args_.sliding_window + 1;
    return args_.sliding_window == 0 || first < 0 ? 0 : first;
  }

  // Queries times the static factors of K; as they are (floats) or as 16-bit integers (pairs).
  // scale[row] is what the products must be multiplied by; NaN where the query is not finite.
  void prepare_queries() {
    const TensorLayout& k = args_.layout.k;
    const float* factors =
        args_.k_scale == nullptr ? nullptr : args_.k_scale + int64_t{item_.kv_head} * k.size;
    for (int row = 0; row < rows_; ++row) {
      const float* q = args_.query.at(token_of(row), head_of(row));
      float* out = ws_.query + row * ws_.query_stride;
      for (int c = 0; c < k.size; ++c) out[c] = factors == nullptr ? q[c] : q[c] * factors[c];
      for (int c = k.size; c < ws_.query_stride; ++c) out[c] = 0.0f;
      ws_.scale[row] = is_integer(k.code) ? round_query(out, k.padded_size) : unit(k.code);
      ws_.scale[row] = ws_.scale[row] * args_.softmax_scale + poison_of(q, k.size);
    }
  }

  // 0, or NaN if a value is not finite.
  static float poison_of(const float* q, int size) {
    typename S::Float lanes = S::zero();
    int c = 0;
    for (; c + kTile <= size; c += kTile) lanes = S::fma(S::load(q + c), S::zero(), lanes);
    float poison = S::reduce_add(lanes);
    for (; c < size; ++c) poison += q[c] * 0.0f;
    return poison;
  }

  static float unit(Code code) {
    float unit = 1.0f;
    with_code(code, [&](auto c) { unit = SourceOf<S, c.value>::Type::kUnit; });
    return unit;
  }

  // In place: floats become int16. Returns the step.
  static float round_query(float* q, int size) {
    const int padded = static_cast<int>(round_up(size, 16));
    typename S::Float largest_lanes = S::zero();
    for (int c = 0; c < padded; c += 16)
      largest_lanes = S::max(S::abs(S::load(q + c)), largest_lanes);
    const float largest = S::reduce_max(largest_lanes);
    // The sum over a head must fit into int32.
    const float limit = static_cast<float>(2147483647 / 127 / size);
    const float levels = limit < 32767.0f ? floorf(limit) : 32767.0f;
    const float inverse = largest > 0.0f && largest < INFINITY ? levels / largest : 0.0f;
    alignas(64) int16_t rounded[16];
    auto* out = reinterpret_cast<int16_t*>(q);
    for (int c = 0; c < padded; c += 16) {
      S::store_rounded(rounded, S::mul(S::load(q + c), S::broadcast(inverse)));
      std::memcpy(out + c, rounded, sizeof rounded);
    }
    return largest / levels;
  }

  // A chunk's tiles that some row sees, and where their codes and scales lie.
  struct Tiles {
    int64_t first_position;  // of the first tile
    int count;
    const uint8_t *k[kTilesPerChunk], *v[kTilesPerChunk];
  };

  void attend_chunk(int64_t chunk, State part) {
    const Tiles tiles = find_tiles(chunk);
    multiply_keys(tiles);
    for (int row = 0; row < rows_; ++row) weigh(row, tiles, part);
    multiply_values(tiles, part);
  }

  Tiles find_tiles(int64_t chunk) {
    const Layout& layout = args_.layout;
    const int64_t begin = std::max(first_visible(0), chunk * kChunk) / kTile;
    const int64_t end = std::min(position_of(rows_ - 1) / kTile + 1, (chunk + 1) * kTilesPerChunk);
    Tiles tiles;
    tiles.first_position = begin * kTile;
    tiles.count = static_cast<int>(end - begin);
    const int per_block = layout.tiles_per_block();
    const int32_t* block = item_.block_table + begin / per_block;
    int in_block = static_cast<int>(begin % per_block);
    const uint8_t* k = layout.codes(args_.blocks, layout.k, 0, item_.kv_head, 0);
    const uint8_t* v = layout.codes(args_.blocks, layout.v, 0, item_.kv_head, 0);
    const int64_t k_bytes = layout.k.tile_bytes(), v_bytes = layout.v.tile_bytes();
    for (int i = 0; i < tiles.count; ++i) {
      const int64_t at = *block * layout.block_bytes;
      tiles.k[i] = k + at + in_block * k_bytes;
      tiles.v[i] = v + at + in_block * v_bytes;
      load_dynamic_scales(layout.k, *block, in_block, ws_.k_dynamic + i * kTile);
      load_dynamic_scales(layout.v, *block, in_block, ws_.v_dynamic + i * kTile);
      if (++in_block == per_block) ++block, in_block = 0;
    }
    return tiles;
  }

  void load_dynamic_scales(const TensorLayout& tensor, int64_t block, int in_block, float* out) {
    if (!tensor.dynamic) return;
    S::store(out, S::load_half(
                      args_.layout.scales(args_.blocks, tensor, block, item_.kv_head, in_block)));
  }

  // logits[row][token] = query · codes of K
  void multiply_keys(const Tiles& tiles) {
    const TensorLayout& k = args_.layout.k;
    // Blocks lie anywhere, which no hardware prefetcher foresees: while a tile of K is multiplied
    // a later one is fetched, or the first ones of V.
    const uint8_t* fetch[kTilesPerChunk];
    const int distance = fetch_distance(k.tile_bytes());
    for (int i = 0; i < tiles.count; ++i) {
      const int next = i + distance;
      fetch[i] = next < tiles.count ? tiles.k[next] : tiles.v[std::min(next - tiles.count, i)];
    }
    with_code(k.code, [&](auto code) {
      product<S, code.value, 0>(rows_, {tiles.k, fetch, 1, tiles.count, 1, 0}, k.padded_size,
                                ws_.query, ws_.query_stride, {ws_.logits, kChunk}, ws_.scratch);
    });
  }

  // Far enough for memory to answer, near enough for the first-level cache to keep it.
  static int fetch_distance(int64_t piece_bytes) {
    return static_cast<int>(std::clamp<int64_t>(kFetchBytes / piece_bytes, 1, kMaxFetchDistance));
  }

  static constexpr int kFetchBytes = 4096;
  static constexpr int kMaxFetchDistance = 8;

  // Logits of a row become weights for V, 2^(logit - maximum), times V's dynamic scale; for integer
  // codes rounded to 16 bits. A row that sees nothing of the chunk gets weights of 0.
  void weigh(int row, const Tiles& tiles, State part) {
    const TensorLayout& v = args_.layout.v;
    float* x = ws_.logits + int64_t{row} * kChunk;
    const float factor = args_.softcap == 0.0f ? ws_.scale[row] * kLog2E : kLog2E;
    const float largest = finish_logits(row, tiles, x);
    const bool sees = largest > -INFINITY;
    const float maximum = largest * factor;
    part.maximum[row] = sees ? maximum : -INFINITY;
    const float offset = sees ? log2_of_units(v) - maximum : 0.0f;
    int16_t* rounded = rounded_weights(row);
    if (counts_in_steps(v)) {
      part.sum[row] = weigh_tiles(x, tiles.count, factor, offset, [&](int i, auto weight) {
        S::store_rounded(rounded + i * kTile, weight);
      });
    } else if (!v.dynamic) {
      part.sum[row] = weigh_tiles(x, tiles.count, factor, offset,
                                  [&](int i, auto weight) { S::store(x + i * kTile, weight); });
    } else {
      typename S::Float heaviest = S::zero();
      part.sum[row] = weigh_tiles(x, tiles.count, factor, offset, [&](int i, auto weight) {
        weight = S::mul(weight, S::load(ws_.v_dynamic + i * kTile));
        heaviest = S::max(weight, heaviest);
        S::store(x + i * kTile, weight);
      });
      if (is_integer(v.code))
        ws_.weight_step[row] = round_weights(x, S::reduce_max(heaviest), tiles.count, rounded);
    }
  }

  // Calls use(tile, weights) with 2^(x * factor + offset). Returns the sum of the weights.
  template <class Use>
  static float weigh_tiles(const float* x, int num_tiles, float factor, float offset, Use use) {
    typename S::Float sum = S::zero();
    for (int i = 0; i < num_tiles; ++i) {
      const typename S::Float weight =
          exp2<S>(S::fma(S::load(x + i * kTile), S::broadcast(factor), S::broadcast(offset)));
      sum = S::add(sum, weight);
      use(i, weight);
    }
    return S::reduce_add(sum);
  }

  static constexpr float kWeightLevels = 32767.0f;

  // The unit of weights and their sum is 1, or the step of 16 bits where the largest, which is 1,
  // need not be looked for.
  static bool counts_in_steps(const TensorLayout& v) { return is_integer(v.code) && !v.dynamic; }
  static float log2_of_units(const TensorLayout& v) {
    return counts_in_steps(v) ? 14.99995597f : 0.0f;  // log2(32,767)
  }

  int16_t* rounded_weights(int row) const {
    return reinterpret_cast<int16_t*>(ws_.weights) + int64_t{row} * kChunk;
  }

  // Dynamic scales, softcap and mask. Without softcap the logits still lack the row's scale.
  // Returns the largest.
  float finish_logits(int row, const Tiles& tiles, float* logits) const {
    const int count = tiles.count;
    if (args_.layout.k.dynamic)
      for (int i = 0; i < count; ++i)
        S::store(logits + i * kTile,
                 S::mul(S::load(logits + i * kTile), S::load(ws_.k_dynamic + i * kTile)));
    if (args_.softcap != 0.0f) cap_logits(row, count, logits);
    hide_logits(row, tiles, logits);
    typename S::Float maximum = S::broadcast(-INFINITY);
    for (int i = 0; i < count; ++i) maximum = S::max(S::load(logits + i * kTile), maximum);
    return S::reduce_max(maximum);
  }

  void cap_logits(int row, int num_tiles, float* logits) const {
    const typename S::Float cap = S::broadcast(args_.softcap);
    const typename S::Float scale = S::broadcast(ws_.scale[row]);
    for (int i = 0; i < num_tiles; ++i) {
      const typename S::Float x = S::mul(S::load(logits + i * kTile), scale);
      S::store(logits + i * kTile, S::mul(cap, tanh<S>(S::div(x, cap))));
    }
  }

  // What the row does not see becomes -infinity.
  void hide_logits(int row, const Tiles& tiles, float* logits) const {
    const auto from =
        static_cast<int>(std::max<int64_t>(first_visible(row) - tiles.first_position, 0));
    const auto to = static_cast<int>(
        std::min<int64_t>(position_of(row) + 1 - tiles.first_position, tiles.count * kTile));
    const auto hide = [&](int i) {
      float* x = logits + i * kTile;
      S::store(x, S::select_lanes(from - i * kTile, to - i * kTile, S::load(x),
                                  S::broadcast(-INFINITY)));
    };
    for (int i = 0; i * kTile < from && i < tiles.count; ++i) hide(i);
    for (int i = tiles.count - 1; i >= 0 && (i + 1) * kTile > to; --i) hide(i);
  }

  // Returns the step.
  static float round_weights(const float* weights, float largest, int num_tiles, int16_t* out) {
    const typename S::Float inverse = S::broadcast(largest > 0.0f ? kWeightLevels / largest : 0.0f);
    for (int i = 0; i < num_tiles * kTile; i += kTile)
      S::store_rounded(out + i, S::mul(S::load(weights + i), inverse));
    return largest / kWeightLevels;
  }

  // values[row][channel] = weights · codes of V
  void multiply_values(const Tiles& tiles, State part) {
    const TensorLayout& v = args_.layout.v;
    const int num_outputs = value_size_ / kTile;
    const int panel_bytes = kTile * kTile * code_bytes(v.code);
    const int distance = std::min(fetch_distance(2 * panel_bytes), tiles.count);
    const uint8_t* fetch[kTilesPerChunk];
    for (int i = 0; i < tiles.count; ++i) {
      const int next = i + distance;  // after the last tile the next output's first one
      fetch[i] = next < tiles.count ? tiles.v[next] : tiles.v[next - tiles.count] + panel_bytes;
    }
    const bool integer = is_integer(v.code);
    with_code(v.code, [&](auto code) {
      product<S, code.value, kTile>(
          rows_, {tiles.v, fetch, tiles.count, num_outputs, 0, panel_bytes}, kTile,
          integer ? ws_.weights : ws_.logits, integer ? kChunk / 2 : kChunk,
          {part.values, value_size_}, ws_.scratch);
    });
    if (integer && v.dynamic)
      for (int row = 0; row < rows_; ++row)
        scale_row(part.values + int64_t{row} * value_size_, ws_.weight_step[row]);
  }

  void scale_row(float* values, float factor) const {
    const typename S::Float f = S::broadcast(factor);
    for (int c = 0; c < value_size_; c += kTile)
      S::store(values + c, S::mul(S::load(values + c), f));
  }

  void clear(State state) const {
    for (int row = 0; row < rows_; ++row) state.maximum[row] = -INFINITY, state.sum[row] = 0.0f;
    std::memset(state.values, 0, sizeof(float) * rows_ * value_size_);
  }

  void fold(State state, State part) const {
    for (int row = 0; row < rows_; ++row) {
      if (part.maximum[row] == -INFINITY) continue;
      // One of the factors is 2^0.
      const float change = part.maximum[row] - state.maximum[row];
      const float maximum = change > 0.0f ? part.maximum[row] : state.maximum[row];
      const float old_factor = change > 0.0f ? exp2_of<S>(-change) : 1.0f;
      const float new_factor = change > 0.0f ? 1.0f : exp2_of<S>(change);
      state.maximum[row] = maximum;
      state.sum[row] = state.sum[row] * old_factor + part.sum[row] * new_factor;
      float* to = state.values + int64_t{row} * value_size_;
      const float* from = part.values + int64_t{row} * value_size_;
      const auto a = S::broadcast(old_factor), b = S::broadcast(new_factor);
      for (int c = 0; c < value_size_; c += kTile)
        S::store(to + c, S::fma(S::load(to + c), a, S::mul(S::load(from + c), b)));
    }
  }

  // Sinks, the division by the sum, V's static factors.
  void finish(State state) const {
    const TensorLayout& v = args_.layout.v;
    const float* factors =
        args_.v_scale == nullptr ? nullptr : args_.v_scale + int64_t{item_.kv_head} * v.size;
    for (int row = 0; row < rows_; ++row) {
      float sum = state.sum[row], shrink = 1.0f;
      if (args_.sinks != nullptr) {
        const float sink = args_.sinks[head_of(row)] * kLog2E;
        const float maximum = sink > state.maximum[row] ? sink : state.maximum[row];
        shrink = exp2_of<S>(state.maximum[row] - maximum);
        sum = sum * shrink + exp2_of<S>(sink - maximum + log2_of_units(v));
      }
      const bool finite = ws_.scale[row] - ws_.scale[row] == 0.0f;
      const float factor = finite ? shrink / sum * unit(v.code) : NAN;
      const float* values = state.values + int64_t{row} * value_size_;
      float* out = args_.out + (token_of(row) * args_.num_heads + head_of(row)) * v.size;
      for (int c = 0; c < v.size; ++c)
        out[c] = values[c] * factor * (factors == nullptr ? 1.0f : factors[c]);
    }
  }

  const AttentionArgs& args_;
  const WorkItem& item_;
  float* const partial_;
  Workspace ws_;
  const int rows_;
  const int value_size_;
};

inline void attend_item(const AttentionArgs& args, const WorkItem& item, float* partial_states,
                        float* workspace) {
  RowTile<Simd>(args, item, partial_states, workspace).attend();
}

inline void reduce_item(const AttentionArgs& args, const WorkItem& item, float* partial_states,
                        float* workspace) {
  RowTile<Simd>(args, item, partial_states, workspace).reduce();
}

inline int64_t workspace_size(const AttentionArgs& args) { return Workspace(args, nullptr).total; }

}  // namespace
}  // namespace tightkv
