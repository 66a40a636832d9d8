// Python's view of the kernels. Tensors come as addresses: conversion through DLPack would take
// longer than a short decode. src/tightkv/kernels/cpu.py checks types, shapes and contiguity.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "decoder_layer.h"
#include "dispatch.h"
#include "kernels/kernels.h"

namespace nb = nanobind;

namespace tightkv {
namespace {

constexpr std::array<const char*, kNumCodes> kCodeNames{"float32", "float16",  "bfloat16",
                                                        "int8",    "fp8_e4m3", "fp8_e5m2"};

using Address = uintptr_t;  // 0: none

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// Channels lie next to each other; tokens and heads may lie anywhere.
using StridedAddress = std::tuple<Address, int64_t, int64_t>;

template <class Value = const float>
StridedOf<Value> strided(const StridedAddress& tensor) {
  return {pointer<Value>(std::get<0>(tensor)), std::get<1>(tensor), std::get<2>(tensor)};
}

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

Code code_named(const std::string& name) {
  for (int i = 0; i < kNumCodes; ++i)
    if (name == kCodeNames[i]) return static_cast<Code>(i);
  throw std::invalid_argument("Unknown code type '" + name + "'.");
}

TensorLayout make_tensor_layout(const std::string& code_name, bool dynamic, int size,
                                int padded_size, int64_t codes_offset, int64_t scales_offset) {
  require(size > 0 && size <= kMaxHeadSize, "Head sizes from 1 to 1024 are supported.");
  return {code_named(code_name), dynamic, size, padded_size, codes_offset, scales_offset};
}

Layout make_layout(int64_t block_bytes, int block_size, int num_kv_heads, const TensorLayout& k,
                   const TensorLayout& v) {
  require(block_size > 0 && block_size % kTile == 0, "block_size must be a multiple of 16.");
  return {block_bytes, block_size, num_kv_heads, k, v};
}

LayerCache make_layer_cache(const Layout& layout, Address blocks, int64_t num_blocks,
                            Address k_scale, Address v_scale) {
  return {layout, pointer<uint8_t>(blocks), num_blocks, pointer<const float>(k_scale),
          pointer<const float>(v_scale)};
}

// A batch, with what its tensors ask of a cache.
struct CheckedBatch {
  Batch batch;
  int64_t num_tokens, longest;
  int32_t first_block, last_block;
};

CheckedBatch make_batch(Address query_start_loc, Address seq_lens, Address block_table,
                        int64_t num_seqs, int64_t max_blocks) {
  const Batch batch{pointer<const int32_t>(query_start_loc), pointer<const int32_t>(seq_lens),
                    pointer<const int32_t>(block_table), num_seqs, max_blocks};
  require(batch.query_start_loc[0] == 0, "query_start_loc must begin with 0.");
  int64_t longest = 0;
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t queries = batch.query_start_loc[seq + 1] - batch.query_start_loc[seq];
    require(queries >= 0 && batch.seq_lens[seq] >= queries,
            "A sequence has more queries than tokens, or query_start_loc decreases.");
    longest = std::max<int64_t>(longest, batch.seq_lens[seq]);
  }
  const auto blocks =
      std::minmax_element(batch.block_table, batch.block_table + num_seqs * max_blocks);
  const bool any = num_seqs * max_blocks > 0;
  return {batch, batch.query_start_loc[num_seqs], longest, any ? *blocks.first : 0,
          any ? *blocks.second : 0};
}

// Anything else would read memory that is not the cache's.
void check_batch(const CheckedBatch& batch, const LayerCache& cache, int64_t num_tokens) {
  require(batch.num_tokens == num_tokens,
          "query_start_loc must go from 0 to the number of queries.");
  require(batch.longest <= batch.batch.max_blocks * cache.layout.block_size,
          "A sequence has more tokens than its blocks hold.");
  require(batch.first_block >= 0 && (batch.last_block < cache.num_blocks || batch.longest == 0),
          "block_table names a block outside the cache.");
}

void check_slots(const int64_t* slot_mapping, int64_t num_tokens, const LayerCache& cache) {
  for (int64_t token = 0; token < num_tokens; ++token)
    require(slot_mapping[token] >= 0 &&
                slot_mapping[token] < cache.num_blocks * cache.layout.block_size,
            "A slot of slot_mapping lies outside the cache.");
}

std::pair<int64_t, int64_t> reshape_and_cache(const KernelTable& kernels, const LayerCache& cache,
                                              const StridedAddress& key,
                                              const StridedAddress& value, Address slot_mapping,
                                              Address bad_tokens, int64_t num_tokens,
                                              int num_threads) {
  const WriteArgs args{cache.layout,
                       cache.blocks,
                       strided(key),
                       strided(value),
                       cache.k_scale,
                       cache.v_scale,
                       pointer<const int64_t>(slot_mapping),
                       pointer<bool>(bad_tokens)};
  check_slots(args.slot_mapping, num_tokens, cache);
  nb::gil_scoped_release release;
  const ClipCounts counts = run_write(kernels, args, num_tokens, num_threads);
  return {counts.k, counts.v};
}

void paged_attention(const KernelTable& kernels, const LayerCache& cache, const CheckedBatch& batch,
                     const StridedAddress& query, int64_t num_tokens, int num_heads,
                     float softmax_scale, int64_t sliding_window, float softcap, Address sinks,
                     Address out, int num_threads) {
  const AttentionArgs args{cache.layout,
                           cache.blocks,
                           strided(query),
                           cache.k_scale,
                           cache.v_scale,
                           pointer<float>(out),
                           num_heads,
                           softmax_scale,
                           sliding_window,
                           softcap,
                           pointer<const float>(sinks)};
  check_batch(batch, cache, num_tokens);
  nb::gil_scoped_release release;
  run_attention(kernels, args, batch.batch, num_threads);
}

void linear(const KernelTable& kernels, const std::string& code, Address weight, Address x,
            int64_t x_stride, Address bias, Address other, Address out, int64_t num_rows,
            int in_features, int out_features, int num_threads) {
  nb::gil_scoped_release release;
  run_linear(kernels,
             {code_named(code), pointer<const uint8_t>(weight), pointer<const float>(x), x_stride,
              pointer<const float>(bias), pointer<const float>(other), pointer<float>(out),
              in_features, out_features},
             num_rows, num_threads);
}

void rms_norm(const KernelTable& kernels, const StridedAddress& x, const StridedAddress& out,
              int64_t num_tokens, int num_heads, int size, Address weight, float epsilon,
              int num_threads) {
  nb::gil_scoped_release release;
  run_rms_norm(
      kernels,
      {strided(x), strided<float>(out), num_heads, size, pointer<const float>(weight), epsilon},
      num_tokens, num_threads);
}

void rotary_embedding(const KernelTable& kernels, const StridedAddress& x, int64_t num_tokens,
                      int num_heads, int size, Address cos, Address sin, int num_threads) {
  nb::gil_scoped_release release;
  run_rotary_embedding(
      kernels,
      {strided<float>(x), num_heads, size, pointer<const float>(cos), pointer<const float>(sin)},
      num_tokens, num_threads);
}

void silu_and_mul(const KernelTable& kernels, Address x, Address out, int64_t num_tokens, int size,
                  int num_threads) {
  nb::gil_scoped_release release;
  run_silu_and_mul(kernels, {pointer<const float>(x), pointer<float>(out), size}, num_tokens,
                   num_threads);
}

// Code, weight, bias, in_features, out_features.
using LinearAddress = std::tuple<std::string, Address, Address, int, int>;
// Weight and epsilon.
using NormAddress = std::pair<Address, float>;

Linear make_linear(const LinearAddress& linear) {
  const auto& [code, weight, bias, in_features, out_features] = linear;
  return {code_named(code), pointer<const uint8_t>(weight), pointer<const float>(bias), in_features,
          out_features};
}

RmsNorm make_norm(const NormAddress& norm) {
  return {pointer<const float>(norm.first), norm.second};
}

DecoderLayer make_decoder_layer(const LinearAddress& qkv, const LinearAddress& o_proj,
                                const LinearAddress& gate_up, const LinearAddress& down_proj,
                                const NormAddress& before_attention, const NormAddress& before_mlp,
                                const NormAddress& of_query, const NormAddress& of_key,
                                int num_heads, int num_kv_heads, int head_size, float softmax_scale,
                                int64_t sliding_window) {
  const DecoderLayer layer{make_linear(qkv),
                           make_linear(o_proj),
                           make_linear(gate_up),
                           make_linear(down_proj),
                           make_norm(before_attention),
                           make_norm(before_mlp),
                           make_norm(of_query),
                           make_norm(of_key),
                           num_heads,
                           num_kv_heads,
                           head_size,
                           softmax_scale,
                           sliding_window};
  const int hidden = layer.hidden_size(), query_width = num_heads * head_size;
  require(layer.qkv.out_features == query_width + 2 * num_kv_heads * head_size &&
              layer.o_proj.in_features == query_width && layer.o_proj.out_features == hidden &&
              layer.gate_up.in_features == hidden && layer.down_proj.out_features == hidden &&
              layer.gate_up.out_features == 2 * layer.down_proj.in_features,
          "The products of the layer do not fit each other.");
  return layer;
}

std::pair<int64_t, int64_t> decoder_layer(const KernelTable& kernels, const DecoderLayer& layer,
                                          const LayerCache& cache, const CheckedBatch& batch,
                                          Address slot_mapping, Address bad_tokens, Address hidden,
                                          Address cos, Address sin, int64_t num_tokens,
                                          Address rows, int64_t num_rows, Address out,
                                          int num_threads) {
  const Layout& layout = cache.layout;
  require(layout.num_kv_heads == layer.num_kv_heads && layout.k.size == layer.head_size &&
              layout.v.size == layer.head_size,
          "The cache has other heads than the layer.");
  const LayerStep step{pointer<const float>(hidden),
                       pointer<const float>(cos),
                       pointer<const float>(sin),
                       num_tokens,
                       pointer<const int64_t>(rows),
                       num_rows,
                       pointer<const int64_t>(slot_mapping),
                       pointer<bool>(bad_tokens),
                       batch.batch,
                       pointer<float>(out)};
  check_slots(step.slot_mapping, num_tokens, cache);
  check_batch(batch, cache, num_rows);
  require(step.rows != nullptr || num_rows == num_tokens || num_rows == 0,
          "All tokens come out, or rows are named.");
  for (int64_t row = 0; step.rows != nullptr && row < num_rows; ++row)
    require(step.rows[row] >= 0 && step.rows[row] < num_tokens, "A row is no token of the step.");
  nb::gil_scoped_release release;
  const ClipCounts counts = run_decoder_layer(kernels, layer, cache, step, num_threads);
  return {counts.k, counts.v};
}

}  // namespace
}  // namespace tightkv

NB_MODULE(_native, m) {
  using namespace tightkv;
  m.doc() = "CPU kernels of the KV cache; use them through tightkv.kernels.";
  m.attr("CHUNK") = kChunk;
  m.attr("MAX_HEAD_SIZE") = kMaxHeadSize;
  m.def("available_isas", &available_isas, "Instruction sets this processor can run, best first.");
  m.def("kernels", &kernels_for, nb::rv_policy::reference, nb::arg("isa"));
  nb::class_<TensorLayout>(m, "TensorLayout", "K or V of one layer.")
      .def(nb::new_(&make_tensor_layout), nb::arg("code"), nb::arg("dynamic"), nb::arg("size"),
           nb::arg("padded_size"), nb::arg("codes_offset"), nb::arg("scales_offset"));
  nb::class_<Layout>(m, "Layout", "Addresses within the blocks of one layer.")
      .def(nb::new_(&make_layout), nb::arg("block_bytes"), nb::arg("block_size"),
           nb::arg("num_kv_heads"), nb::arg("k"), nb::arg("v"));
  nb::class_<LayerCache>(m, "LayerCache", "Blocks and static factors of one layer.")
      .def(nb::new_(&make_layer_cache), nb::arg("layout"), nb::arg("blocks"), nb::arg("num_blocks"),
           nb::arg("k_scale"), nb::arg("v_scale"));
  nb::class_<CheckedBatch>(m, "Batch", "Which tokens of which sequences attend.")
      .def(nb::new_(&make_batch), nb::arg("query_start_loc"), nb::arg("seq_lens"),
           nb::arg("block_table"), nb::arg("num_seqs"), nb::arg("max_blocks"));
  nb::class_<DecoderLayer>(m, "DecoderLayer", "Weights of a decoder layer of the shared kind.")
      .def(nb::new_(&make_decoder_layer), nb::arg("qkv"), nb::arg("o_proj"), nb::arg("gate_up"),
           nb::arg("down_proj"), nb::arg("before_attention"), nb::arg("before_mlp"),
           nb::arg("of_query"), nb::arg("of_key"), nb::arg("num_heads"), nb::arg("num_kv_heads"),
           nb::arg("head_size"), nb::arg("softmax_scale"), nb::arg("sliding_window"));
  nb::class_<KernelTable>(m, "Kernels", "The kernels of one instruction set.")
      .def("reshape_and_cache", &reshape_and_cache, nb::arg("cache"), nb::arg("key"),
           nb::arg("value"), nb::arg("slot_mapping"), nb::arg("bad_tokens"), nb::arg("num_tokens"),
           nb::arg("num_threads"), "Quantizes and stores; returns the clipped values of K and V.")
      .def("paged_attention", &paged_attention, nb::arg("cache"), nb::arg("batch"),
           nb::arg("query"), nb::arg("num_tokens"), nb::arg("num_heads"), nb::arg("softmax_scale"),
           nb::arg("sliding_window"), nb::arg("softcap"), nb::arg("sinks"), nb::arg("out"),
           nb::arg("num_threads"), "Attention of the batch's queries over the cache, into `out`.")
      .def("linear", &linear, nb::arg("code"), nb::arg("weight"), nb::arg("x"), nb::arg("x_stride"),
           nb::arg("bias"), nb::arg("other"), nb::arg("out"), nb::arg("num_rows"),
           nb::arg("in_features"), nb::arg("out_features"), nb::arg("num_threads"),
           "x @ weight.T + bias + other.")
      .def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("out"), nb::arg("num_tokens"),
           nb::arg("num_heads"), nb::arg("size"), nb::arg("weight"), nb::arg("epsilon"),
           nb::arg("num_threads"), "Norm over the channels of each head, into `out`.")
      .def("rotary_embedding", &rotary_embedding, nb::arg("x"), nb::arg("num_tokens"),
           nb::arg("num_heads"), nb::arg("size"), nb::arg("cos"), nb::arg("sin"),
           nb::arg("num_threads"), "RoPE, in place.")
      .def("silu_and_mul", &silu_and_mul, nb::arg("x"), nb::arg("out"), nb::arg("num_tokens"),
           nb::arg("size"), nb::arg("num_threads"), "silu(first half) * second half, into `out`.")
      .def("decoder_layer", &decoder_layer, nb::arg("layer"), nb::arg("cache"), nb::arg("batch"),
           nb::arg("slot_mapping"), nb::arg("bad_tokens"), nb::arg("hidden"), nb::arg("cos"),
           nb::arg("sin"), nb::arg("num_tokens"), nb::arg("rows"), nb::arg("num_rows"),
           nb::arg("out"), nb::arg("num_threads"),
           "A decoder layer, into `out`; returns the clipped values of K and V.");
}
