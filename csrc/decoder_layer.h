// The decoder layer that most models share, in one call: RMSNorm, attention with RoPE, gated MLP.
#pragma once

#include "dispatch.h"

namespace tightkv {

// The blocks of one layer, and its static factors [num_kv_heads, size] or null.
struct LayerCache {
  Layout layout;
  uint8_t* blocks;
  int64_t num_blocks;
  const float *k_scale, *v_scale;
};

struct Linear {
  Code code;
  const uint8_t* weight;  // panels, as in LinearArgs
  const float* bias;      // or null
  int in_features, out_features;
};

struct RmsNorm {
  const float* weight;  // null: no norm
  float epsilon;
};

struct DecoderLayer {
  Linear qkv, o_proj, gate_up, down_proj;
  RmsNorm before_attention, before_mlp;  // over the hidden size
  RmsNorm of_query, of_key;              // over each head
  int num_heads, num_kv_heads, head_size;
  float softmax_scale;
  int64_t sliding_window;  // 0: none

  int hidden_size() const { return qkv.in_features; }
};

// What a step gives a layer.
struct LayerStep {
  const float* hidden;     // [num_tokens, hidden size]
  const float *cos, *sin;  // [num_tokens, head size]
  int64_t num_tokens;
  const int64_t* rows;  // [num_rows], the tokens that come out; null: all
  int64_t num_rows;
  const int64_t* slot_mapping;
  bool* bad_tokens;
  Batch batch;  // of the tokens that come out
  float* out;   // [num_rows, hidden size]; may be `hidden` if all come out
};

// Writes K and V of all tokens into the cache; what follows is computed for those that come out.
ClipCounts run_decoder_layer(const KernelTable& kernels, const DecoderLayer& layer,
                             const LayerCache& cache, const LayerStep& step, int num_threads);

}  // namespace tightkv
