#include "monograph/gguf/decode_blocks.h"

#include <bit>
#include <cstring>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"

namespace monograph::gguf {
namespace {

constexpr std::size_t kElements = 32, kHalf = 16;

template <class T>
float plain(const std::uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return to_float(value);
}

// Four-bit codes of 32 elements: element i below, element i + 16 above.
template <class Value>
void nibbles(const std::uint8_t* codes, float* out, Value value) {
  for (std::size_t i = 0; i < kHalf; ++i) {
    out[i] = value(codes[i] & 15u, i);
    out[i + kHalf] = value(codes[i] >> 4, i + kHalf);
  }
}

void q4_0(const std::uint8_t* block, float* out) {
  const float d = plain<Fp16>(block);
  nibbles(block + 2, out, [&](unsigned code, std::size_t) {
    return d * static_cast<float>(static_cast<int>(code) - 8);
  });
}

void q4_1(const std::uint8_t* block, float* out) {
  const float d = plain<Fp16>(block), m = plain<Fp16>(block + 2);
  nibbles(block + 4, out,
          [&](unsigned code, std::size_t) { return d * static_cast<float>(code) + m; });
}

unsigned fifth(const std::uint8_t* bits, std::size_t i) {
  return (bits[i / 8] >> (i % 8) & 1u) << 4;
}

void q5_0(const std::uint8_t* block, float* out) {
  const float d = plain<Fp16>(block);
  const std::uint8_t* bits = block + 2;
  nibbles(block + 6, out, [&](unsigned code, std::size_t i) {
    return d * static_cast<float>(static_cast<int>(code | fifth(bits, i)) - 16);
  });
}

void q5_1(const std::uint8_t* block, float* out) {
  const float d = plain<Fp16>(block), m = plain<Fp16>(block + 2);
  const std::uint8_t* bits = block + 4;
  nibbles(block + 8, out, [&](unsigned code, std::size_t i) {
    return d * static_cast<float>(code | fifth(bits, i)) + m;
  });
}

void q8_0(const std::uint8_t* block, float* out) {
  const float d = plain<Fp16>(block);
  for (std::size_t i = 0; i < kElements; ++i) {
    out[i] = d * static_cast<float>(static_cast<std::int8_t>(block[2 + i]));
  }
}

void iq4_nl(const std::uint8_t* block, float* out) {
  const float d = plain<Fp16>(block);
  nibbles(block + 2, out, [&](unsigned code, std::size_t) { return d * kIq4Values[code]; });
}

void mxfp4(const std::uint8_t* block, float* out) {
  // Twice the values of E2M1; the scale is halved for it, which 2^-127 can be too.
  constexpr float kDoubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  const std::uint32_t e = block[0];
  const float half = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  nibbles(block + 1, out, [&](unsigned code, std::size_t) {
    const float magnitude = kDoubled[code & 7u] * half;
    return code >= 8 ? -magnitude : magnitude;
  });
}

template <auto One>
void each(const std::uint8_t* blocks, std::size_t count, std::size_t bytes, float* out) {
  for (std::size_t i = 0; i < count; ++i) One(blocks + i * bytes, out + i * kElements);
}

template <class T>
void floats(const std::uint8_t* bytes, std::size_t count, float* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = plain<T>(bytes + i * sizeof(T));
}

}  // namespace

void decode(TensorType type, const std::uint8_t* blocks, std::size_t count, float* out) {
  const std::size_t bytes = info_of(type).block_bytes;
  switch (type) {
    case TensorType::kF32:
      return floats<float>(blocks, count, out);
    case TensorType::kF16:
      return floats<Fp16>(blocks, count, out);
    case TensorType::kBF16:
      return floats<Bf16>(blocks, count, out);
    case TensorType::kQ4:
      return each<q4_0>(blocks, count, bytes, out);
    case TensorType::kQ4Min:
      return each<q4_1>(blocks, count, bytes, out);
    case TensorType::kQ5:
      return each<q5_0>(blocks, count, bytes, out);
    case TensorType::kQ5Min:
      return each<q5_1>(blocks, count, bytes, out);
    case TensorType::kQ8:
      return each<q8_0>(blocks, count, bytes, out);
    case TensorType::kIQ4:
      return each<iq4_nl>(blocks, count, bytes, out);
    case TensorType::kMxfp4:
      return each<mxfp4>(blocks, count, bytes, out);
    case TensorType::kQ4K:
    case TensorType::kQ5K:
    case TensorType::kQ6K:
    case TensorType::kIQ4Xs:
      return decode_superblocks(type, blocks, count, out);
  }
}

}  // namespace monograph::gguf
