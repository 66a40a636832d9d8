// x @ weight.T + bias + other, a tile of rows and some panels of the weight at a time.
#pragma once

#include <algorithm>

#include "kernels/product.h"

namespace tightkv {
namespace {

// How far ahead of the product a weight is fetched from memory, in bytes, if each panel is read
// only once. If it is read for several groups of rows, the first one fetches the next panel.
constexpr int64_t kFetchDistance = 8192;

// The sum of each value runs over the inputs in their order, whatever the rows and panels.
inline void linear_tile(const LinearArgs& args, const LinearTile& tile, float* scratch) {
  using S = Simd;
  const int64_t panel_bytes = int64_t{args.in_features} * kTile * code_bytes(args.code);
  const int whole = std::min(tile.panel_end, args.out_features / kTile) - tile.panel_begin;
  const float* x = args.x + tile.row_begin * args.x_stride;
  const int rows = static_cast<int>(tile.row_end - tile.row_begin);
  const auto multiply = [&](int panel, int count, float* out, int64_t stride) {
    const uint8_t* first = args.weight + panel * panel_bytes;
    const uint8_t* fetch = first + (rows > S::kMaxRows ? panel_bytes : kFetchDistance);
    with_code(args.code, [&](auto code) {
      if constexpr (code_bytes(code.value) > 1)  // floats of a checkpoint
        product<S, code.value, 0>(rows, {&first, &fetch, 1, count, 0, panel_bytes},
                                  args.in_features, x, args.x_stride, {out, stride}, scratch);
    });
  };
  float* out = args.out + tile.row_begin * args.out_features;
  multiply(tile.panel_begin, whole, out + tile.panel_begin * kTile, args.out_features);
  if (tile.panel_begin + whole < tile.panel_end) {  // the last, with fewer columns than lanes
    const int column = args.out_features / kTile * kTile;
    float lanes[kLinearRows * kTile];
    multiply(column / kTile, 1, lanes, kTile);
    for (int row = 0; row < rows; ++row)
      std::copy_n(lanes + row * kTile, args.out_features - column,
                  out + int64_t{row} * args.out_features + column);
  }
  const int begin = tile.panel_begin * kTile;
  const int end = std::min(tile.panel_end * kTile, args.out_features);
  for (int row = 0; row < rows; ++row, out += args.out_features) {
    if (args.bias != nullptr)
      for (int c = begin; c < end; ++c) out[c] += args.bias[c];
    if (args.other != nullptr) {
      const float* other = args.other + (tile.row_begin + row) * args.out_features;
      for (int c = begin; c < end; ++c) out[c] += other[c];
    }
  }
}

}  // namespace
}  // namespace tightkv
