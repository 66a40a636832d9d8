#include "dispatch.h"

#include <omp.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <algorithm>
#include <stdexcept>

#include "scratch.h"

namespace tightkv {
namespace {

#ifdef __x86_64__
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

// Not among the names that every compiler knows.
bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}
#endif

std::vector<const KernelTable*> available_kernels() {
  std::vector<const KernelTable*> tables;
#ifdef TIGHTKV_WITH_AVX512_VNNI
  if (has_avx512() && __builtin_cpu_supports("avx512vnni")) tables.push_back(&kAvx512VnniKernels);
#endif
#ifdef TIGHTKV_WITH_AVX512
  if (has_avx512()) tables.push_back(&kAvx512Kernels);
#endif
#ifdef TIGHTKV_WITH_AVX_VNNI
  if (has_avx_vnni()) tables.push_back(&kAvxVnniKernels);
#endif
#ifdef TIGHTKV_WITH_AVX2
  if (has_avx2()) tables.push_back(&kAvx2Kernels);
#endif
#ifdef TIGHTKV_WITH_NEON
  tables.push_back(&kNeonKernels);  // part of every AArch64
#endif
  tables.push_back(&kScalarKernels);
  return tables;
}

thread_local Scratch workspace;
thread_local Scratch partial_states;

struct Plan {
  int64_t chunks_per_item;           // when keys are split
  int heads_per_item;                // of a decode
  std::vector<WorkItem> items;       // independent of each other
  std::vector<WorkItem> reductions;  // each folds what several items left
  int64_t partial_floats = 0;
};

// First chunk that a row at `position` sees.
int64_t first_chunk(const AttentionArgs& args, int64_t position) {
  if (args.sliding_window == 0) return 0;
  return std::max<int64_t>(0, position - args.sliding_window + 1) / kChunk;
}

// A tile of rows over many chunks: one item per run of chunks, states kept apart until the end.
void split_over_keys(const AttentionArgs& args, WorkItem whole, Plan* plan) {
  const int rows = whole.num_kv_heads * whole.num_tokens * args.group();
  const int64_t state = state_floats(rows, args.layout.v.padded_size);
  whole.split = true;
  whole.partial_offset = plan->partial_floats;
  plan->reductions.push_back(whole);
  for (int64_t chunk = whole.chunk_begin; chunk < whole.chunk_end; chunk += plan->chunks_per_item) {
    WorkItem item = whole;
    item.chunk_begin = chunk;
    item.chunk_end = std::min(chunk + plan->chunks_per_item, whole.chunk_end);
    item.partial_offset = plan->partial_floats;
    plan->partial_floats += state * (item.chunk_end - item.chunk_begin);
    plan->items.push_back(item);
  }
}

// KV heads whose codes are read together, for they lie side by side: as many as leave those of half
// a chunk in the second-level cache while they wait.
int heads_read_together(const AttentionArgs& args) {
  constexpr int64_t kBytesThatWait = 256 * 1024;
  const int64_t bytes = std::max(args.layout.k.tile_bytes(), args.layout.v.tile_bytes());
  const int64_t most =
      std::min<int64_t>(kBytesThatWait / (bytes * kTilesPerChunk), kMaxTileRows / args.group());
  return static_cast<int>(std::clamp<int64_t>(most, 1, args.layout.num_kv_heads));
}

// Long items read memory best; a few for each thread leave the rest to others if one is held up.
Plan plan_items(const AttentionArgs& args, const Batch& batch, int num_threads) {
  constexpr int64_t kItemsPerThread = 3, kLeastChunks = 2;
  int64_t chunks = 0;
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq)
    chunks += (batch.seq_lens[seq] - 1) / kChunk + 1 - first_chunk(args, batch.seq_lens[seq] - 1);
  const int64_t per_item = chunks / (kItemsPerThread * num_threads);
  return {std::max(per_item, kLeastChunks), per_item > 0 ? heads_read_together(args) : 1, {}, {}};
}

void plan_sequence(const AttentionArgs& args, const Batch& batch, int64_t seq, Plan* plan) {
  const int64_t begin = batch.query_start_loc[seq], end = batch.query_start_loc[seq + 1];
  const int64_t offset = batch.seq_lens[seq] - end;  // position = token + offset
  const int64_t tokens_per_tile = std::max(1, kMaxTileRows / args.group());
  const bool one_tile = end - begin <= tokens_per_tile;
  for (int64_t token = begin; token < end; token += tokens_per_tile) {
    const int64_t last = std::min(token + tokens_per_tile, end) - 1;
    const int num_heads = args.layout.num_kv_heads;
    const int heads_per_item = last == token ? plan->heads_per_item : 1;
    for (int head = 0; head < num_heads; head += heads_per_item) {
      const WorkItem item{batch.block_table + seq * batch.max_blocks,
                          token,
                          token + offset,
                          static_cast<int>(last - token + 1),
                          head,
                          std::min(heads_per_item, num_heads - head),
                          first_chunk(args, token + offset),
                          (last + offset) / kChunk + 1,
                          false,
                          0};
      if (one_tile && item.chunk_end - item.chunk_begin > plan->chunks_per_item)
        split_over_keys(args, item, plan);
      else
        plan->items.push_back(item);
    }
  }
}

using Run = void (*)(const AttentionArgs&, const WorkItem&, float*, float*);

void run_items(const std::vector<WorkItem>& items, const AttentionArgs& args, float* partials,
               int num_threads, Run run, int64_t worth_threads) {
  const int64_t floats = workspace_floats(args);
  const auto count = static_cast<int64_t>(items.size());
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (count >= worth_threads)
  for (int64_t i = 0; i < count; ++i) run(args, items[i], partials, workspace.get(floats));
}

// Work on tokens that do not depend on each other, in one piece per thread.
template <class Args>
void run_tokens(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t num_tokens,
                int64_t values_per_token, int num_threads) {
  constexpr int64_t kValuesWorthThreads = 32768;
  if (num_tokens == 0) return;
  const int64_t piece = (num_tokens + num_threads - 1) / num_threads;
#pragma omp parallel for schedule(static) \
    num_threads(num_threads) if (num_tokens * values_per_token >= kValuesWorthThreads)
  for (int64_t begin = 0; begin < num_tokens; begin += piece)
    kernel(args, begin, std::min(begin + piece, num_tokens));
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : available_kernels()) names.emplace_back(table->name);
  return names;
}

const KernelTable& kernels_for(const std::string& isa) {
  std::string known;
  for (const KernelTable* table : available_kernels()) {
    if (isa == table->name) return *table;
    known += (known.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::invalid_argument("Instruction set '" + isa +
                              "' is not available: this build and processor have " + known + ".");
}

ClipCounts run_write(const KernelTable& kernels, const WriteArgs& args, int64_t num_tokens,
                     int num_threads) {
  constexpr int64_t kTokensPerItem = 16;
  int64_t k = 0, v = 0;
#pragma omp parallel for schedule(static) num_threads(num_threads) \
    reduction(+ : k, v) if (num_tokens > kTokensPerItem)
  for (int64_t begin = 0; begin < num_tokens; begin += kTokensPerItem) {
    const ClipCounts counts =
        kernels.write(args, begin, std::min(begin + kTokensPerItem, num_tokens));
    k += counts.k;
    v += counts.v;
  }
  return {k, v};
}

void run_attention(const KernelTable& kernels, const AttentionArgs& args, const Batch& batch,
                   int num_threads) {
  Plan plan = plan_items(args, batch, num_threads);
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) plan_sequence(args, batch, seq, &plan);
  float* partials = partial_states.get(plan.partial_floats);
  run_items(plan.items, args, partials, num_threads, kernels.attend, 2);
  run_items(plan.reductions, args, partials, num_threads, kernels.reduce, 32);
}

void run_linear(const KernelTable& kernels, const LinearArgs& args, int64_t num_rows,
                int num_threads) {
  // Pieces of equal size, some for each thread: one that is held up leaves the rest to others.
  constexpr int kPiecesPerThread = 3;
  const int64_t pieces = std::min(num_threads * kPiecesPerThread, args.num_panels());
  const int64_t row_blocks = (num_rows + kLinearRows - 1) / kLinearRows;
  const int64_t scratch_floats = int64_t{args.in_features} * kTile;
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
  for (int64_t i = 0; i < row_blocks * pieces; ++i) {
    const int64_t rows = i / pieces * kLinearRows, piece = i % pieces;
    kernels.linear(args,
                   {rows, std::min(rows + kLinearRows, num_rows),
                    static_cast<int>(piece * args.num_panels() / pieces),
                    static_cast<int>((piece + 1) * args.num_panels() / pieces)},
                   workspace.get(scratch_floats));
  }
}

void run_rms_norm(const KernelTable& kernels, const RmsNormArgs& args, int64_t num_tokens,
                  int num_threads) {
  run_tokens(kernels.rms_norm, args, num_tokens, int64_t{args.num_heads} * args.size, num_threads);
}

void run_rotary_embedding(const KernelTable& kernels, const RotaryArgs& args, int64_t num_tokens,
                          int num_threads) {
  run_tokens(kernels.rotary_embedding, args, num_tokens, int64_t{args.num_heads} * args.size,
             num_threads);
}

void run_silu_and_mul(const KernelTable& kernels, const SiluAndMulArgs& args, int64_t num_tokens,
                      int num_threads) {
  run_tokens(kernels.silu_and_mul, args, num_tokens, args.size, num_threads);
}

}  // namespace tightkv
