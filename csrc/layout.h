// Address arithmetic of a block: the C++ side of src/tightkv/formats/layout.py.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tightkv {

constexpr int kTile = 16;  // tokens per tile of K, channels per tile of V

// Order as in bindings.cpp, which exports the names.
enum class Code : int { kFloat32, kFloat16, kBFloat16, kInt8, kFp8E4M3, kFp8E5M2 };
constexpr int kNumCodes = 6;

constexpr int code_bytes(Code code) {
  return code == Code::kFloat32 ? 4 : code == Code::kFloat16 || code == Code::kBFloat16 ? 2 : 1;
}

// Values of one dot product that lie side by side.
constexpr int interleave(Code code) { return code == Code::kInt8 ? 2 : 1; }

// K or V of one layer.
struct TensorLayout {
  Code code;
  bool dynamic;          // an fp16 scale per token and head, at scales_offset
  int size;              // channels
  int padded_size;       // channels as stored
  int64_t codes_offset;  // bytes from the block's start
  int64_t scales_offset;

  // Of the codes of 16 tokens of one head.
  int64_t tile_bytes() const { return int64_t{padded_size} * kTile * code_bytes(code); }
};

struct Layout {
  int64_t block_bytes;
  int block_size;
  int num_kv_heads;
  TensorLayout k, v;

  int tiles_per_block() const { return block_size / kTile; }

  // First byte of the 16 tokens of `tile` (counted within the block) of one head.
  template <class Byte>
  Byte* codes(Byte* blocks, const TensorLayout& tensor, int64_t block, int head, int tile) const {
    return blocks + block * block_bytes + tensor.codes_offset +
           (int64_t{head} * tiles_per_block() + tile) * tensor.tile_bytes();
  }

  // First dynamic scale, fp16 bits, of the 16 tokens of `tile` of one head.
  template <class Byte>
  auto scales(Byte* blocks, const TensorLayout& tensor, int64_t block, int head, int tile) const {
    Byte* first = blocks + block * block_bytes + tensor.scales_offset +
                  (int64_t{head} * block_size + int64_t{tile} * kTile) * 2;
    using Half = std::conditional_t<std::is_const_v<Byte>, const uint16_t, uint16_t>;
    return reinterpret_cast<Half*>(first);
  }
};

// Position of one value among the codes of a tile. K: lanes are tokens; V: lanes are channels.
constexpr int k_index(int channel, int token, int pair) {
  return (channel / pair * kTile + token) * pair + channel % pair;
}

constexpr int v_index(int channel, int token, int pair) {
  const int panel = channel / kTile * kTile * kTile;
  return panel + (token / pair * kTile + channel % kTile) * pair + token % pair;
}

}  // namespace tightkv
