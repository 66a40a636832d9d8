// What one instruction set offers, and the arguments. No Python, no Torch, no allocation.
#pragma once

#include <cstdint>

#include "layout.h"

namespace tightkv {

// Keys are summed in chunks of this many tokens, at fixed positions of the sequence. A row's
// result is the fold of its chunks in order, so it does not depend on what else is in the batch,
// on how the prompt was cut, or on the number of threads.
constexpr int kChunk = 256;
constexpr int kTilesPerChunk = kChunk / kTile;

// Most rows (query tokens times heads of a group) that are worked on together.
constexpr int kMaxTileRows = 48;

constexpr int kMaxHeadSize = 1024;  // channels of K, or of V

// [token, head, channel], channels contiguous.
template <class Value>
struct StridedOf {
  Value* data;
  int64_t token_stride, head_stride;  // in values
  Value* at(int64_t token, int head) const {
    return data + token * token_stride + head * head_stride;
  }
};
using Strided = StridedOf<const float>;

struct WriteArgs {
  Layout layout;
  uint8_t* blocks;
  Strided key, value;
  const float *k_scale, *v_scale;  // static factors [num_kv_heads, size], or null
  const int64_t* slot_mapping;
  bool* bad_tokens;
};

struct ClipCounts {
  int64_t k, v;
};

struct AttentionArgs {
  Layout layout;
  const uint8_t* blocks;
  Strided query;
  const float *k_scale, *v_scale;
  float* out;  // [num_tokens, num_heads, value size]
  int num_heads;
  float softmax_scale;
  int64_t sliding_window;  // 0: none
  float softcap;           // 0: none
  const float* sinks;      // [num_heads], or null

  int group() const { return num_heads / layout.num_kv_heads; }
};

// Most rows of a linear layer that are worked on together.
constexpr int kLinearRows = 48;

// out = x @ weight.T + bias + other
struct LinearArgs {
  Code code;                  // of the weight, a float
  const uint8_t* weight;      // panels [out_features / 16, rounded up][in_features][16]
  const float* x;             // [num_rows, in_features]
  int64_t x_stride;           // from row to row
  const float *bias, *other;  // [out_features], [num_rows, out_features]; or null
  float* out;                 // [num_rows, out_features]
  int in_features, out_features;

  int num_panels() const { return (out_features + kTile - 1) / kTile; }
};

struct LinearTile {
  int64_t row_begin, row_end;  // at most kLinearRows
  int panel_begin, panel_end;
};

// out = weight * x / sqrt(mean(x^2) + epsilon), over the channels of each head.
struct RmsNormArgs {
  Strided x;
  StridedOf<float> out;
  int num_heads, size;
  const float* weight;
  float epsilon;
};

// RoPE in place: channel c is paired with channel c + size / 2.
struct RotaryArgs {
  StridedOf<float> x;
  int num_heads, size;
  const float *cos, *sin;  // [num_tokens, size]
};

// out = silu(first half of x) * second half
struct SiluAndMulArgs {
  const float* x;  // [num_tokens, 2 * size]
  float* out;      // [num_tokens, size]
  int size;
};

// Rows of one sequence, for some KV heads, over a range of chunks.
struct WorkItem {
  const int32_t* block_table;  // of the sequence
  int64_t first_token;         // of the rows, in query and out
  int64_t first_position;      // of the rows, in the sequence
  int num_tokens;
  int kv_head, num_kv_heads;  // the first, and how many; of more than one token: one
  int64_t chunk_begin, chunk_end;
  // Whether the chunks of these rows are divided among several items. If so each chunk's state is
  // kept, from this float of the partial states on, and folded when all are there.
  bool split;
  int64_t partial_offset;
};

// Rows after some chunks: the largest logit, the sum of weights, the weighted sum of V.
// As floats: [rows] maximum, [rows] sum, [rows][padded value size].
inline int64_t state_floats(int rows, int padded_value_size) {
  return int64_t{rows} * (2 + padded_value_size);
}

int64_t workspace_floats(const AttentionArgs& args);

struct KernelTable {
  const char* name;
  ClipCounts (*write)(const WriteArgs&, int64_t begin, int64_t end);
  // Attends over the item's chunks; writes out or, for a split item, a state per chunk.
  void (*attend)(const AttentionArgs&, const WorkItem&, float* partial_states, float* workspace);
  // Folds the states of all chunks of an item and writes out.
  void (*reduce)(const AttentionArgs&, const WorkItem&, float* partial_states, float* workspace);
  void (*linear)(const LinearArgs&, const LinearTile&, float* scratch);
  void (*rms_norm)(const RmsNormArgs&, int64_t begin, int64_t end);
  void (*rotary_embedding)(const RotaryArgs&, int64_t begin, int64_t end);
  void (*silu_and_mul)(const SiluAndMulArgs&, int64_t begin, int64_t end);
};

extern const KernelTable kScalarKernels;
#ifdef TIGHTKV_WITH_AVX2
extern const KernelTable kAvx2Kernels;
#endif
#ifdef TIGHTKV_WITH_AVX_VNNI
extern const KernelTable kAvxVnniKernels;
#endif
#ifdef TIGHTKV_WITH_AVX512_VNNI
extern const KernelTable kAvx512VnniKernels;
#endif
#ifdef TIGHTKV_WITH_AVX512
extern const KernelTable kAvx512Kernels;
#endif
#ifdef TIGHTKV_WITH_NEON
extern const KernelTable kNeonKernels;
#endif

}  // namespace tightkv
