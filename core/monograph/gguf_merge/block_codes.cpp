// Codes into the bytes of ggml's blocks: the way back of gguf/decode_blocks.h.

#include "monograph/base/error.h"
#include "monograph/gguf/blocks.h"
#include "monograph/gguf_merge/block_grid.h"

namespace monograph::gguf {
namespace {

using Codes = const std::uint8_t*;

std::uint8_t pair_of(unsigned low, unsigned high) {
  return static_cast<std::uint8_t>((low & 15u) | (high & 15u) << 4);
}

// 2 * `half` codes to `half` bytes: code i below, code i + half above.
void nibbles(Codes codes, std::size_t half, std::uint8_t* out) {
  for (std::size_t i = 0; i < half; ++i) out[i] = pair_of(codes[i], codes[i + half]);
}

// 32 fifth bits in four bytes.
void fifth_bits(Codes codes, std::uint8_t* out) {
  std::uint32_t bits = 0;
  for (std::uint32_t i = 0; i < kBlock; ++i) bits |= (codes[i] >> 4 & 1u) << i;
  for (std::size_t i = 0; i < 4; ++i) out[i] = static_cast<std::uint8_t>(bits >> 8 * i);
}

void q5(Codes codes, std::size_t at, std::uint8_t* block) {
  fifth_bits(codes, block + at);
  nibbles(codes, kBlock / 2, block + at + 4);
}

void q8_0(Codes codes, std::uint8_t* block) {
  for (std::size_t i = 0; i < kBlock; ++i) {
    block[2 + i] = static_cast<std::uint8_t>(static_cast<int>(codes[i]) - 127);
  }
}

// Q4_K and Q5_K: 64 codes, of two parts, to 32 bytes.
void four_pairs(Codes codes, std::uint8_t* out) {
  for (std::size_t pair = 0; pair < 4; ++pair) nibbles(codes + pair * 64, 32, out + pair * 32);
}

void q5_k(Codes codes, std::uint8_t* block) {
  four_pairs(codes, block + 48);
  for (std::size_t i = 0; i < 32; ++i) {
    unsigned bits = 0;
    for (std::size_t part = 0; part < 8; ++part) bits |= (codes[part * 32 + i] >> 4 & 1u) << part;
    block[16 + i] = static_cast<std::uint8_t>(bits);
  }
}

void q6_k(Codes codes, std::uint8_t* block) {
  for (std::size_t half = 0; half < 2; ++half) {
    Codes own = codes + half * 128;
    nibbles(own, 64, block + half * 64);
    for (std::size_t i = 0; i < 32; ++i) {
      unsigned pairs = 0;
      for (std::size_t quarter = 0; quarter < 4; ++quarter) {
        pairs |= (own[quarter * 32 + i] >> 4 & 3u) << (2 * quarter);
      }
      block[128 + half * 32 + i] = static_cast<std::uint8_t>(pairs);
    }
  }
}

void iq4_xs(Codes codes, std::uint8_t* block) {
  for (std::size_t part = 0; part < 8; ++part) {
    nibbles(codes + part * 32, 16, block + 8 + part * 16);
  }
}

void set_block(TensorType type, Codes codes, std::uint8_t* block) {
  switch (type) {
    case TensorType::kQ4:
    case TensorType::kIQ4:
      return nibbles(codes, kBlock / 2, block + 2);
    case TensorType::kQ4Min:
      return nibbles(codes, kBlock / 2, block + 4);
    case TensorType::kMxfp4:
      return nibbles(codes, kBlock / 2, block + 1);
    case TensorType::kQ5:
      return q5(codes, 2, block);
    case TensorType::kQ5Min:
      return q5(codes, 4, block);
    case TensorType::kQ8:
      return q8_0(codes, block);
    case TensorType::kQ4K:
      return four_pairs(codes, block + 16);
    case TensorType::kQ5K:
      return q5_k(codes, block);
    case TensorType::kQ6K:
      return q6_k(codes, block);
    case TensorType::kIQ4Xs:
      return iq4_xs(codes, block);
    default:
      MONOGRAPH_ASSERT(false);  // plain floats have no codes
  }
}

}  // namespace

void set_codes(TensorType type, const std::uint8_t* codes, std::size_t count,
               std::uint8_t* blocks) {
  const TensorTypeInfo& info = info_of(type);
  for (std::size_t i = 0; i < count; ++i) {
    set_block(type, codes + i * info.block_elements, blocks + i * info.block_bytes);
  }
}

}  // namespace monograph::gguf
