// Compares every instruction set that this build and processor have with the scalar kernels, on
// random data: stored bytes, clip counts and bad tokens must be equal, attention within a
// tolerance. `make test-isa` builds and runs it, also for processors that only an emulator offers:
// hence no Python and no Torch here. The scalar kernels themselves are checked by tests/kernels.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "dispatch.h"

namespace tightkv {
namespace {

constexpr int kThreads = 2;
// As in src/tightkv/formats/base.py, as a share of the largest output.
constexpr float kFloatTolerance = 4e-6f;
constexpr float kIntegerTolerance = 2e-4f;

struct Format {
  Code code;
  bool has_static, dynamic;
};

struct Shape {
  int num_kv_heads, group, head_size, value_size, block_size;
};

// Query tokens and all tokens of each sequence: decode and prefill, across the borders of tiles,
// of blocks and of chunks.
struct Lengths {
  int queries, tokens;
};
constexpr Lengths kSequences[] = {{1, 1}, {1, 5}, {1, 530}, {13, 13}, {1, 256}, {21, 290}};
constexpr int kNumSequences = 6;

// Group sizes take the products through all their numbers of rows; 80, 72, 33 and 40 are padded.
constexpr Shape kShapes[] = {{1, 1, 64, 64, 16},   {2, 3, 64, 64, 16}, {1, 8, 128, 128, 32},
                             {2, 5, 80, 72, 16},   {1, 2, 33, 40, 48}, {1, 7, 16, 256, 16},
                             {1, 11, 256, 16, 16}, {1, 50, 32, 32, 16}};

std::vector<Format> all_formats() {
  std::vector<Format> formats{{Code::kFloat32, false, false},
                              {Code::kFloat16, false, false},
                              {Code::kBFloat16, false, false}};
  for (Code code : {Code::kInt8, Code::kFp8E4M3, Code::kFp8E5M2})
    for (bool has_static : {false, true})
      for (bool dynamic : {false, true}) formats.push_back({code, has_static, dynamic});
  return formats;
}

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// As src/tightkv/formats/layout.py.
Layout make_layout(const Shape& shape, const Format& k, const Format& v) {
  Layout layout{};
  layout.block_size = shape.block_size;
  layout.num_kv_heads = shape.num_kv_heads;
  int64_t end = 0;
  const auto section = [&](int64_t bytes) {
    const int64_t begin = end;
    end += round_up(bytes, 64);
    return begin;
  };
  const int64_t tokens = int64_t{shape.num_kv_heads} * shape.block_size;
  const auto tensor = [&](const Format& format, int size, int multiple) {
    const int padded = static_cast<int>(round_up(size, multiple));
    return TensorLayout{format.code,
                        format.dynamic,
                        size,
                        padded,
                        section(tokens * padded * code_bytes(format.code)),
                        0};
  };
  layout.k = tensor(k, shape.head_size, 2);
  layout.v = tensor(v, shape.value_size, kTile);
  layout.k.scales_offset = section(k.dynamic ? 2 * tokens : 0);
  layout.v.scales_offset = section(v.dynamic ? 2 * tokens : 0);
  layout.block_bytes = end;
  return layout;
}

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

class Random {
 public:
  Floats normal(int64_t count) {
    Floats x(count);
    for (float& value : x) value = std::normal_distribution<float>()(engine_);
    return x;
  }

  Floats scales(int64_t count) {
    Floats x(count);
    for (float& value : x)
      value = std::exp2(std::uniform_real_distribution<float>(-6.0f, 0.0f)(engine_));
    return x;
  }

  // Any bits: all exponents, subnormal numbers, zeros; now and then Inf and NaN.
  Floats bits(int64_t count) {
    Floats x(count);
    for (float& value : x) {
      auto bits = static_cast<uint32_t>(engine_());
      if (bits % 64 == 0) bits &= 0x80000000u;
      const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
      if (!finite && engine_() % 4 != 0) bits ^= 0x40000000u;
      std::memcpy(&value, &bits, sizeof value);
    }
    return x;
  }

  template <class T>
  std::vector<T> permutation(int64_t count) {
    std::vector<T> x(count);
    std::iota(x.begin(), x.end(), T{0});
    std::shuffle(x.begin(), x.end(), engine_);
    return x;
  }

 private:
  std::mt19937 engine_{20240229};
};

// What the cases of one shape have in common: drawing it takes longer than the kernels.
struct Inputs {
  Floats key, value, any_key, any_value, query;

  Inputs(const Shape& shape, Random& random) {
    int64_t tokens = 0, queries = 0;
    for (const Lengths& lengths : kSequences) {
      tokens += lengths.tokens;
      queries += lengths.queries;
    }
    const int64_t k_floats = tokens * shape.num_kv_heads * shape.head_size;
    const int64_t v_floats = tokens * shape.num_kv_heads * shape.value_size;
    key = random.normal(k_floats);
    value = random.normal(v_floats);
    any_key = random.bits(k_floats);
    any_value = random.bits(v_floats);
    query = random.normal(queries * shape.num_kv_heads * shape.group * shape.head_size);
    query[0] = INFINITY;  // that row must become NaN, and only that row
  }
};

// A cache of all sequences, its blocks in random order.
struct Case {
  Shape shape;
  Format k_format, v_format;
  Layout layout;
  int num_blocks = 0, max_blocks = 0, num_tokens = 0, num_queries = 0;
  std::vector<int32_t> block_table, query_start_loc{0}, seq_lens;
  std::vector<int64_t> slot_mapping;
  Floats k_scale, v_scale, sinks;

  Case(const Shape& a_shape, const Format& k, const Format& v, Random& random)
      : shape(a_shape), k_format(k), v_format(v), layout(make_layout(a_shape, k, v)) {
    for (const Lengths& lengths : kSequences) {
      const int blocks = (lengths.tokens + shape.block_size - 1) / shape.block_size;
      num_blocks += blocks;
      max_blocks = std::max(max_blocks, blocks);
      num_tokens += lengths.tokens;
      num_queries += lengths.queries;
      query_start_loc.push_back(num_queries);
      seq_lens.push_back(lengths.tokens);
    }
    const auto free_blocks = random.permutation<int32_t>(num_blocks);
    auto next = free_blocks.begin();
    block_table.resize(int64_t{kNumSequences} * max_blocks);
    for (int seq = 0; seq < kNumSequences; ++seq) {
      int32_t* const row = &block_table[int64_t{seq} * max_blocks];
      for (int token = 0; token < seq_lens[seq]; ++token) {
        if (token % shape.block_size == 0) row[token / shape.block_size] = *next++;
        slot_mapping.push_back(int64_t{row[token / shape.block_size]} * shape.block_size +
                               token % shape.block_size);
      }
    }
    if (k.has_static) k_scale = random.scales(int64_t{shape.num_kv_heads} * shape.head_size);
    if (v.has_static) v_scale = random.scales(int64_t{shape.num_kv_heads} * shape.value_size);
    sinks = random.normal(num_heads());
  }

  int num_heads() const { return shape.num_kv_heads * shape.group; }
};

const float* data_or_null(const Floats& x) { return x.empty() ? nullptr : x.data(); }

struct Written {
  Bytes blocks, bad_tokens;
  ClipCounts clipped;
};

Written write(const KernelTable& kernels, const Case& c, const Floats& key, const Floats& value) {
  // Not zeros, so that bytes that ought to be written and are not show.
  Written written{Bytes(c.num_blocks * c.layout.block_bytes, 0xa5), Bytes(c.num_tokens, 0), {}};
  const int heads = c.shape.num_kv_heads, k_size = c.shape.head_size, v_size = c.shape.value_size;
  const WriteArgs args{c.layout,
                       written.blocks.data(),
                       {key.data(), int64_t{heads} * k_size, k_size},
                       {value.data(), int64_t{heads} * v_size, v_size},
                       data_or_null(c.k_scale),
                       data_or_null(c.v_scale),
                       c.slot_mapping.data(),
                       reinterpret_cast<bool*>(written.bad_tokens.data())};
  written.clipped = run_write(kernels, args, c.num_tokens, kThreads);
  return written;
}

struct Options {
  int sliding_window;
  float softcap;
  bool sinks;
};
constexpr Options kOptions[] = {{0, 0.0f, false}, {100, 5.0f, true}};

Floats attend(const KernelTable& kernels, const Case& c, const Bytes& blocks, const Floats& query,
              const Options& options) {
  Floats out(int64_t{c.num_queries} * c.num_heads() * c.shape.value_size);
  const int size = c.shape.head_size;
  const AttentionArgs args{c.layout,
                           blocks.data(),
                           {query.data(), int64_t{c.num_heads()} * size, size},
                           data_or_null(c.k_scale),
                           data_or_null(c.v_scale),
                           out.data(),
                           c.num_heads(),
                           1.0f / std::sqrt(static_cast<float>(size)),
                           options.sliding_window,
                           options.softcap,
                           options.sinks ? c.sinks.data() : nullptr};
  const Batch batch{c.query_start_loc.data(), c.seq_lens.data(), c.block_table.data(),
                    kNumSequences, c.max_blocks};
  run_attention(kernels, args, batch, kThreads);
  return out;
}

// Largest difference as a share of the largest number; infinite where one is NaN and one is not.
float difference(const Floats& x, const Floats& expected) {
  float largest = 0.0f, error = 0.0f;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]) != std::isnan(expected[i])) return INFINITY;
    if (std::isnan(x[i])) continue;
    largest = std::max(largest, std::fabs(expected[i]));
    error = std::max(error, std::fabs(x[i] - expected[i]));
  }
  return error / largest;
}

const char* const kCodeNames[kNumCodes] = {"float32", "float16",  "bfloat16",
                                           "int8",    "fp8_e4m3", "fp8_e5m2"};

std::string describe(const Format& format) {
  return std::string(kCodeNames[static_cast<int>(format.code)]) +
         (format.has_static ? " static" : "") + (format.dynamic ? " dynamic" : "");
}

struct Totals {
  int writes = 0, attentions = 0, failures = 0;
  float float_error = 0.0f, integer_error = 0.0f;

  void fail(const char* what, const Case& c) {
    if (++failures > 20) return;
    std::printf("  FAILED: %s; K %s, V %s, %d KV heads of %d queries, sizes %d and %d\n", what,
                describe(c.k_format).c_str(), describe(c.v_format).c_str(), c.shape.num_kv_heads,
                c.shape.group, c.shape.head_size, c.shape.value_size);
  }
};

void compare_writes(const KernelTable& kernels, const Case& c, const Floats& key,
                    const Floats& value, Totals* totals) {
  const Written expected = write(kScalarKernels, c, key, value);
  const Written got = write(kernels, c, key, value);
  ++totals->writes;
  if (got.blocks != expected.blocks) totals->fail("stored bytes differ", c);
  if (got.bad_tokens != expected.bad_tokens) totals->fail("bad tokens differ", c);
  if (got.clipped.k != expected.clipped.k || got.clipped.v != expected.clipped.v)
    totals->fail("clip counts differ", c);
}

void compare_attention(const KernelTable& kernels, const Case& c, const Bytes& blocks,
                       const Floats& query, Totals* totals) {
  const bool integer = c.k_format.code == Code::kInt8 || c.v_format.code == Code::kInt8;
  float* const worst = integer ? &totals->integer_error : &totals->float_error;
  for (const Options& options : kOptions) {
    const float error = difference(attend(kernels, c, blocks, query, options),
                                   attend(kScalarKernels, c, blocks, query, options));
    ++totals->attentions;
    *worst = std::max(*worst, error);
    if (!(error <= (integer ? kIntegerTolerance : kFloatTolerance)))
      totals->fail("attention differs", c);
  }
}

void compare_case(const KernelTable& kernels, const Case& c, const Inputs& inputs, Totals* totals) {
  compare_writes(kernels, c, inputs.any_key, inputs.any_value, totals);
  compare_writes(kernels, c, inputs.key, inputs.value, totals);
  const Written written = write(kScalarKernels, c, inputs.key, inputs.value);
  compare_attention(kernels, c, written.blocks, inputs.query, totals);
}

// Returns the number of failures.
int compare(const KernelTable& kernels) {
  Random random;
  Totals totals;
  const std::vector<Format> formats = all_formats();
  for (size_t shift = 0; shift < std::size(kShapes); ++shift) {
    const Inputs inputs(kShapes[shift], random);
    for (size_t i = 0; i < formats.size(); ++i) {
      const Format& v = formats[(i + shift) % formats.size()];  // every shape pairs them otherwise
      compare_case(kernels, Case(kShapes[shift], formats[i], v, random), inputs, &totals);
    }
  }
  std::printf(
      "%s against scalar: %d writes and %d attentions, largest difference %.1e with float codes "
      "(allowed: %.0e), %.1e with int8 (allowed: %.0e); %d failures\n",
      kernels.name, totals.writes, totals.attentions, totals.float_error, kFloatTolerance,
      totals.integer_error, kIntegerTolerance, totals.failures);
  return totals.failures;
}

}  // namespace
}  // namespace tightkv

int main() {
  using namespace tightkv;
  int failures = 0, compared = 0;
  for (const std::string& isa : available_isas()) {
    if (isa == kScalarKernels.name) continue;
    failures += compare(kernels_for(isa));
    ++compared;
  }
  if (compared == 0)
    std::printf("Nothing to compare: this build and processor have only the scalar kernels.\n");
  return failures == 0 ? 0 : 1;
}
