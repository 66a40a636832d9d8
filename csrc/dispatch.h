// Choice of the instruction set, and the division of a batch into work items.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace tightkv {

// Instruction sets that this build and this processor both have, the best first.
std::vector<std::string> available_isas();

// The kernels of one of them. Throws std::invalid_argument for any other name.
const KernelTable& kernels_for(const std::string& isa);

struct Batch {
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* seq_lens;         // [num_seqs]
  const int32_t* block_table;      // [num_seqs, max_blocks]
  int64_t num_seqs, max_blocks;
};

ClipCounts run_write(const KernelTable& kernels, const WriteArgs& args, int64_t num_tokens,
                     int num_threads);

void run_attention(const KernelTable& kernels, const AttentionArgs& args, const Batch& batch,
                   int num_threads);

void run_linear(const KernelTable& kernels, const LinearArgs& args, int64_t num_rows,
                int num_threads);

void run_rms_norm(const KernelTable& kernels, const RmsNormArgs& args, int64_t num_tokens,
                  int num_threads);

void run_rotary_embedding(const KernelTable& kernels, const RotaryArgs& args, int64_t num_tokens,
                          int num_threads);

void run_silu_and_mul(const KernelTable& kernels, const SiluAndMulArgs& args, int64_t num_tokens,
                      int num_threads);

}  // namespace tightkv
