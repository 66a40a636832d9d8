// Paged attention over one chunk of keys for a tile of rows, and the fold over chunks.
//
// A panel is 16 tokens of K (depth: channels) or 16 channels of V (depth: tokens). Integer codes
// meet queries and weights rounded to 16 bits: their sums fit, 127 * 32,767 * 256 < 2^31.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/exp2.h"
#include "kernels/kernels.h"
#include "kernels/product.h"

namespace tightkv {
namespace {

// ---- a tile of rows ----

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Pieces of a thread's workspace. The stride is in floats; all pieces start on a cache line.
struct Workspace {
  int64_t query_stride;
  float *query, *scale, *logits, *weight_step, *weights, *state, *chunk, *k_dynamic, *v_dynamic,
      *scratch;

  Workspace(const AttentionArgs& args, float* memory) {
    const int rows = max_rows(args);
    query_stride = round_up(args.layout.k.padded_size, 16);
    float** const pieces[] = {&query, &scale, &logits,    &weight_step, &weights,
                              &state, &chunk, &k_dynamic, &v_dynamic,   &scratch};
    const int64_t sizes[] = {rows * query_stride,
                             rows,
                             int64_t{rows} * kChunk,
                             rows,
                             int64_t{rows} * kChunk,
                             state_floats(rows, args.layout.v.padded_size),
                             state_floats(rows, args.layout.v.padded_size),
                             int64_t{rows} * kChunk,
                             int64_t{rows} * kChunk,
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
        rows_per_head_(item.num_tokens * args.group()),
        rows_(item.num_kv_heads * rows_per_head_),
        value_size_(args.layout.v.padded_size) {}

  void attend() {
    prepare_queries();
    next_ = find_tiles(item_.chunk_begin);
    fetch_keys(next_);
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
  int kv_head_of(int row) const { return item_.kv_head + row / rows_per_head_; }
  int head_of(int row) const { return kv_head_of(row) * args_.group() + row % args_.group(); }
  int token_in_item(int row) const { return row % rows_per_head_ / args_.group(); }
  int64_t token_of(int row) const { return item_.first_token + token_in_item(row); }
  int64_t position_of(int row) const { return item_.first_position + token_in_item(row); }

  // First position that the row sees.
  int64_t first_visible(int row) const {
    const int64_t first = position_of(row) - args_.sliding_window + 1;
    return args_.sliding_window == 0 || first < 0 ? 0 : first;
  }

  // Queries times the static factors of K; as they are (floats) or as 16-bit integers (pairs).
  // scale[row] is what the products must be multiplied by; NaN where the query is not finite.
  void prepare_queries() {
    const TensorLayout& k = args_.layout.k;
    for (int row = 0; row < rows_; ++row) {
      const float* factors = factors_of(args_.k_scale, k, row);
      const float* q = args_.query.at(token_of(row), head_of(row));
      float* out = ws_.query + row * ws_.query_stride;
      for (int c = 0; c < k.size; ++c) out[c] = factors == nullptr ? q[c] : q[c] * factors[c];
      for (int c = k.size; c < ws_.query_stride; ++c) out[c] = 0.0f;
      ws_.scale[row] = is_integer(k.code) ? round_query(out, k.padded_size) : unit(k.code);
      ws_.scale[row] = ws_.scale[row] * args_.softmax_scale + poison_of(q, k.size);
    }
  }

  // Static factors of the row's KV head, or null.
  const float* factors_of(const float* scale, const TensorLayout& tensor, int row) const {
    return scale == nullptr ? nullptr : scale + int64_t{kv_head_of(row)} * tensor.size;
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

  // A chunk's tiles that some row sees, and where those of the item's first head lie.
  struct Tiles {
    int64_t first_position;  // of the first tile
    int count;
    const uint8_t *k[kTilesPerChunk], *v[kTilesPerChunk];
    const uint16_t *k_scales[kTilesPerChunk], *v_scales[kTilesPerChunk];  // if dynamic
  };

  // All heads' keys, then all heads' values: so codes are needed in about the order of memory.
  void attend_chunk(int64_t chunk, State part) {
    const Tiles tiles = next_;
    next_.count = 0;
    if (chunk + 1 < item_.chunk_end) next_ = find_tiles(chunk + 1);
    load_dynamic_scales(args_.layout.k, tiles.k_scales, tiles.count, ws_.k_dynamic);
    load_dynamic_scales(args_.layout.v, tiles.v_scales, tiles.count, ws_.v_dynamic);
    for (int head = 0; head < item_.num_kv_heads; ++head) multiply_keys(head, tiles);
    for (int row = 0; row < rows_; ++row) weigh(row, tiles, part);
    for (int head = 0; head < item_.num_kv_heads; ++head) multiply_values(head, tiles, part);
  }

  Tiles find_tiles(int64_t chunk) const {
    const Layout& layout = args_.layout;
    const int64_t begin = std::max(first_visible(0), chunk * kChunk) / kTile;
    const int64_t end = std::min(position_of(rows_ - 1) / kTile + 1, (chunk + 1) * kTilesPerChunk);
    Tiles tiles;
    tiles.first_position = begin * kTile;
    tiles.count = static_cast<int>(end - begin);
    const int per_block = layout.tiles_per_block(), head = item_.kv_head;
    for (int i = 0; i < tiles.count; ++i) {
      const int64_t block = item_.block_table[(begin + i) / per_block];
      const auto in_block = static_cast<int>((begin + i) % per_block);
      tiles.k[i] = layout.codes(args_.blocks, layout.k, block, head, in_block);
      tiles.v[i] = layout.codes(args_.blocks, layout.v, block, head, in_block);
      tiles.k_scales[i] = layout.scales(args_.blocks, layout.k, block, head, in_block);
      tiles.v_scales[i] = layout.scales(args_.blocks, layout.v, block, head, in_block);
    }
    return tiles;
  }

  void load_dynamic_scales(const TensorLayout& tensor, const uint16_t* const* scales, int count,
                           float* out) const {
    if (!tensor.dynamic) return;
    for (int head = 0; head < item_.num_kv_heads; ++head)
      for (int i = 0; i < count; ++i)
        S::store(out + head * kChunk + i * kTile,
                 S::load_half(scales[i] + int64_t{head} * args_.layout.block_size));
  }

  // ---- fetching: from memory into the second level, half a chunk ahead ----
  //
  // Blocks lie anywhere, which no hardware prefetcher foresees, and the first level waits for few
  // lines at a time. While keys are multiplied their chunk's values are fetched, while values are
  // multiplied the next chunk's keys: a tile for a tile, in the order in which they lie.

  // Bytes from a head's tile to the next head's.
  int64_t head_bytes(const TensorLayout& tensor) const {
    return args_.layout.tiles_per_block() * tensor.tile_bytes();
  }

  // Where the `n`th tile of all heads lies; beyond the last one, the first.
  const uint8_t* tile_in_order(const uint8_t* const* tiles, int count, const TensorLayout& tensor,
                               int n) const {
    const int per_block = std::min(args_.layout.tiles_per_block(), count);
    const int per_group = item_.num_kv_heads * per_block;
    const int head = n % per_group / per_block;
    const int tile = n / per_group * per_block + n % per_block;
    return tile < count ? tiles[tile] + head * head_bytes(tensor) : tiles[0];
  }

  void fetch_keys(const Tiles& tiles) const {
    const TensorLayout& k = args_.layout.k;
    for (int n = 0; n < item_.num_kv_heads * tiles.count; ++n) {
      const uint8_t* codes = tile_in_order(tiles.k, tiles.count, k, n);
      for (int64_t at = 0; at < k.tile_bytes(); at += 64) fetch_line(codes + at);
    }
  }

  // logits[row][token] = query · codes of K
  void multiply_keys(int head, const Tiles& tiles) {
    const TensorLayout& k = args_.layout.k;
    const uint8_t *panels[kTilesPerChunk], *fetch[kTilesPerChunk];
    for (int i = 0; i < tiles.count; ++i) {
      panels[i] = tiles.k[i] + head * head_bytes(k);
      fetch[i] = tile_in_order(tiles.v, tiles.count, args_.layout.v, head * tiles.count + i);
    }
    const int row = head * rows_per_head_;
    with_code(k.code, [&](auto code) {
      product<S, code.value, 0>(rows_per_head_, {panels, fetch, 1, tiles.count, 1, 0},
                                k.padded_size, ws_.query + row * ws_.query_stride, ws_.query_stride,
                                {ws_.logits + int64_t{row} * kChunk, kChunk}, ws_.scratch);
    });
  }

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
    const float* v_dynamic = ws_.v_dynamic + row / rows_per_head_ * kChunk;
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
        weight = S::mul(weight, S::load(v_dynamic + i * kTile));
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
    const float* k_dynamic = ws_.k_dynamic + row / rows_per_head_ * kChunk;
    if (args_.layout.k.dynamic)
      for (int i = 0; i < count; ++i)
        S::store(logits + i * kTile,
                 S::mul(S::load(logits + i * kTile), S::load(k_dynamic + i * kTile)));
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
  void multiply_values(int head, const Tiles& tiles, State part) {
    const TensorLayout& v = args_.layout.v;
    const int num_outputs = value_size_ / kTile;
    const int panel_bytes = kTile * kTile * code_bytes(v.code);
    const uint8_t *panels[kTilesPerChunk], *fetch[kTilesPerChunk];
    for (int i = 0; i < tiles.count; ++i) {
      panels[i] = tiles.v[i] + head * head_bytes(v);
      fetch[i] = next_.count == 0
                     ? panels[i]
                     : tile_in_order(next_.k, next_.count, args_.layout.k, head * tiles.count + i);
    }
    const int begin = head * rows_per_head_, end = begin + rows_per_head_;
    const bool integer = is_integer(v.code);
    with_code(v.code, [&](auto code) {
      product<S, code.value, kTile>(
          rows_per_head_, {panels, fetch, tiles.count, num_outputs, 0, panel_bytes}, kTile,
          integer ? reinterpret_cast<float*>(rounded_weights(begin))
                  : ws_.logits + int64_t{begin} * kChunk,
          integer ? kChunk / 2 : kChunk, {part.values + int64_t{begin} * value_size_, value_size_},
          ws_.scratch);
    });
    if (integer && v.dynamic)
      for (int row = begin; row < end; ++row)
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
    for (int row = 0; row < rows_; ++row) {
      const float* factors = factors_of(args_.v_scale, v, row);
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
  Tiles next_;                      // of the next chunk; none after the last
  const int rows_per_head_, rows_;  // those of a KV head lie side by side
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
