// Python's view of the kernels. Tensors come as addresses: conversion through DLPack would take
// longer than a short decode. src/tightkv/kernels/cpu.py checks types, shapes and contiguity.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

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

Strided strided(const StridedAddress& tensor) {
  return {pointer<const float>(std::get<0>(tensor)), std::get<1>(tensor), std::get<2>(tensor)};
}

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

TensorLayout make_tensor_layout(const std::string& code_name, bool dynamic, int size,
                                int padded_size, int64_t codes_offset, int64_t scales_offset) {
  require(size > 0 && size <= kMaxHeadSize, "Head sizes from 1 to 1024 are supported.");
  for (int i = 0; i < kNumCodes; ++i)
    if (code_name == kCodeNames[i])
      return {static_cast<Code>(i), dynamic, size, padded_size, codes_offset, scales_offset};
  throw std::invalid_argument("Unknown code type '" + code_name + "'.");
}

Layout make_layout(int64_t block_bytes, int block_size, int num_kv_heads, const TensorLayout& k,
                   const TensorLayout& v) {
  require(block_size > 0 && block_size % kTile == 0, "block_size must be a multiple of 16.");
  return {block_bytes, block_size, num_kv_heads, k, v};
}

// Anything else would read memory that is not the cache's.
void check_batch(const Batch& batch, const Layout& layout, int64_t num_blocks, int64_t num_tokens) {
  require(batch.query_start_loc[0] == 0 && batch.query_start_loc[batch.num_seqs] == num_tokens,
          "query_start_loc must go from 0 to the number of queries.");
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    const int64_t queries = batch.query_start_loc[seq + 1] - batch.query_start_loc[seq];
    require(queries >= 0 && batch.seq_lens[seq] >= queries,
            "A sequence has more queries than tokens, or query_start_loc decreases.");
    const int64_t used = (batch.seq_lens[seq] + layout.block_size - 1) / layout.block_size;
    require(used <= batch.max_blocks, "A sequence has more tokens than its blocks hold.");
    const int32_t* table = batch.block_table + seq * batch.max_blocks;
    for (int64_t i = 0; i < used; ++i)
      require(table[i] >= 0 && table[i] < num_blocks,
              "block_table names a block outside the cache.");
  }
}

std::pair<int64_t, int64_t> reshape_and_cache(
    const KernelTable& kernels, const Layout& layout, Address blocks, int64_t num_blocks,
    const StridedAddress& key, const StridedAddress& value, Address k_scale, Address v_scale,
    Address slot_mapping, Address bad_tokens, int64_t num_tokens, int num_threads) {
  const WriteArgs args{layout,
                       pointer<uint8_t>(blocks),
                       strided(key),
                       strided(value),
                       pointer<const float>(k_scale),
                       pointer<const float>(v_scale),
                       pointer<const int64_t>(slot_mapping),
                       pointer<bool>(bad_tokens)};
  for (int64_t token = 0; token < num_tokens; ++token)
    require(
        args.slot_mapping[token] >= 0 && args.slot_mapping[token] < num_blocks * layout.block_size,
        "A slot of slot_mapping lies outside the cache.");
  nb::gil_scoped_release release;
  const ClipCounts counts = run_write(kernels, args, num_tokens, num_threads);
  return {counts.k, counts.v};
}

void paged_attention(const KernelTable& kernels, const Layout& layout, Address blocks,
                     int64_t num_blocks, const StridedAddress& query, int64_t num_tokens,
                     int num_heads, Address k_scale, Address v_scale, Address query_start_loc,
                     Address seq_lens, Address block_table, int64_t num_seqs, int64_t max_blocks,
                     float softmax_scale, int64_t sliding_window, float softcap, Address sinks,
                     Address out, int num_threads) {
  const AttentionArgs args{layout,
                           pointer<const uint8_t>(blocks),
                           strided(query),
                           pointer<const float>(k_scale),
                           pointer<const float>(v_scale),
                           pointer<float>(out),
                           num_heads,
                           softmax_scale,
                           sliding_window,
                           softcap,
                           pointer<const float>(sinks)};
  const Batch batch{pointer<const int32_t>(query_start_loc), pointer<const int32_t>(seq_lens),
                    pointer<const int32_t>(block_table), num_seqs, max_blocks};
  check_batch(batch, layout, num_blocks, num_tokens);
  nb::gil_scoped_release release;
  run_attention(kernels, args, batch, num_threads);
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
  nb::class_<KernelTable>(m, "Kernels", "The kernels of one instruction set.")
      .def("reshape_and_cache", &reshape_and_cache, nb::arg("layout"), nb::arg("blocks"),
           nb::arg("num_blocks"), nb::arg("key"), nb::arg("value"), nb::arg("k_scale"),
           nb::arg("v_scale"), nb::arg("slot_mapping"), nb::arg("bad_tokens"),
           nb::arg("num_tokens"), nb::arg("num_threads"),
           "Quantizes and stores; returns the clipped values of K and V.")
      .def("paged_attention", &paged_attention, nb::arg("layout"), nb::arg("blocks"),
           nb::arg("num_blocks"), nb::arg("query"), nb::arg("num_tokens"), nb::arg("num_heads"),
           nb::arg("k_scale"), nb::arg("v_scale"), nb::arg("query_start_loc"), nb::arg("seq_lens"),
           nb::arg("block_table"), nb::arg("num_seqs"), nb::arg("max_blocks"),
           nb::arg("softmax_scale"), nb::arg("sliding_window"), nb::arg("softcap"),
           nb::arg("sinks"), nb::arg("out"), nb::arg("num_threads"),
           "Attention of the batch's queries over the cache, into `out`.");
}
