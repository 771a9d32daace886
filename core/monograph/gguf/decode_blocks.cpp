#include "monograph/gguf/decode_blocks.h"

#include "monograph/gguf/blocks.h"

namespace monograph::gguf {
namespace {

constexpr std::size_t kHalf = kBlock / 2;

// Four-bit codes of 32 elements: element i below, element i + 16 above.
template <class Value>
void nibbles(const std::uint8_t* codes, float* out, Value value) {
  for (std::size_t i = 0; i < kHalf; ++i) {
    out[i] = value(codes[i] & 15u, i);
    out[i + kHalf] = value(codes[i] >> 4, i + kHalf);
  }
}

void q4_0(const std::uint8_t* block, float* out) {
  const float d = float_at<Fp16>(block);
  nibbles(block + 2, out, [&](unsigned code, std::size_t) {
    return d * static_cast<float>(static_cast<int>(code) - 8);
  });
}

void q4_1(const std::uint8_t* block, float* out) {
  const float d = float_at<Fp16>(block), m = float_at<Fp16>(block + 2);
  nibbles(block + 4, out,
          [&](unsigned code, std::size_t) { return d * static_cast<float>(code) + m; });
}

unsigned fifth(const std::uint8_t* bits, std::size_t i) {
  return (bits[i / 8] >> (i % 8) & 1u) << 4;
}

void q5_0(const std::uint8_t* block, float* out) {
  const float d = float_at<Fp16>(block);
  const std::uint8_t* bits = block + 2;
  nibbles(block + 6, out, [&](unsigned code, std::size_t i) {
    return d * static_cast<float>(static_cast<int>(code | fifth(bits, i)) - 16);
  });
}

void q5_1(const std::uint8_t* block, float* out) {
  const float d = float_at<Fp16>(block), m = float_at<Fp16>(block + 2);
  const std::uint8_t* bits = block + 4;
  nibbles(block + 8, out, [&](unsigned code, std::size_t i) {
    return d * static_cast<float>(code | fifth(bits, i)) + m;
  });
}

void q8_0(const std::uint8_t* block, float* out) {
  const float d = float_at<Fp16>(block);
  for (std::size_t i = 0; i < kBlock; ++i) {
    out[i] = d * static_cast<float>(static_cast<std::int8_t>(block[2 + i]));
  }
}

void iq4_nl(const std::uint8_t* block, float* out) {
  const float d = float_at<Fp16>(block);
  nibbles(block + 2, out, [&](unsigned code, std::size_t) { return d * kIq4Values[code]; });
}

void mxfp4(const std::uint8_t* block, float* out) {
  const float half = half_of_e8m0(block[0]);
  nibbles(block + 1, out, [&](unsigned code, std::size_t) { return half * kMxfp4Values[code]; });
}

template <class T>
void floats(const std::uint8_t* bytes, std::size_t count, float* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = float_at<T>(bytes + i * sizeof(T));
}

// Not for plain floats.
BlockDecoder decoder_of(TensorType type) {
  switch (type) {
    case TensorType::kQ4:
      return q4_0;
    case TensorType::kQ4Min:
      return q4_1;
    case TensorType::kQ5:
      return q5_0;
    case TensorType::kQ5Min:
      return q5_1;
    case TensorType::kQ8:
      return q8_0;
    case TensorType::kIQ4:
      return iq4_nl;
    case TensorType::kMxfp4:
      return mxfp4;
    case TensorType::kQ4K:
    case TensorType::kQ5K:
    case TensorType::kQ6K:
    case TensorType::kIQ4Xs:
      return superblock_decoder(type);
    case TensorType::kF32:
    case TensorType::kF16:
    case TensorType::kBF16:
      break;
  }
  return nullptr;
}

}  // namespace

void decode(TensorType type, const std::uint8_t* blocks, std::size_t count, float* out) {
  if (type == TensorType::kF32) return floats<float>(blocks, count, out);
  if (type == TensorType::kF16) return floats<Fp16>(blocks, count, out);
  if (type == TensorType::kBF16) return floats<Bf16>(blocks, count, out);
  const TensorTypeInfo& info = info_of(type);
  const BlockDecoder decode_block = decoder_of(type);
  for (std::size_t i = 0; i < count; ++i) {
    decode_block(blocks + i * info.block_bytes, out + i * info.block_elements);
  }
}

}  // namespace monograph::gguf
