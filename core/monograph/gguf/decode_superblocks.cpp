#include "monograph/gguf/decode_blocks.h"
#include "monograph/gguf/superblock_scales.h"

namespace monograph::gguf {
namespace {

// Q4_K; Q5_K with `fifth`.
void with_minimum(const std::uint8_t* block, const std::uint8_t* fifth, const std::uint8_t* nibbles,
                  float* out) {
  const float d = float_at<Fp16>(block), dmin = float_at<Fp16>(block + 2);
  for (std::size_t part = 0; part < 8; ++part) {
    const ScaleAndMinimum six = six_bits(block + 4, part);
    const float scale = d * six.scale, minimum = dmin * six.minimum;
    const std::uint8_t* codes = nibbles + part / 2 * 32;
    for (std::size_t i = 0; i < 32; ++i) {
      unsigned code = part % 2 == 0 ? codes[i] & 15u : codes[i] >> 4;
      if (fifth != nullptr) code |= (fifth[i] >> part & 1u) << 4;
      out[part * 32 + i] = scale * static_cast<float>(code) - minimum;
    }
  }
}

void q4_k(const std::uint8_t* block, float* out) { with_minimum(block, nullptr, block + 16, out); }

void q5_k(const std::uint8_t* block, float* out) {
  with_minimum(block, block + 16, block + 48, out);
}

// Two halves of 128: 64 bytes of low nibbles and 32 of pairs each. The four quarters of a half are
// low nibbles of bytes 0 to 31, of 32 to 63, then the high nibbles of the same; pair q is theirs.
void q6_k(const std::uint8_t* block, float* out) {
  const float d = float_at<Fp16>(block + 208);
  for (std::size_t half = 0; half < 2; ++half) {
    const std::uint8_t* low = block + half * 64;
    const std::uint8_t* high = block + 128 + half * 32;
    const std::uint8_t* scales = block + 192 + half * 8;
    for (std::size_t i = 0; i < 128; ++i) {
      const std::size_t quarter = i / 32;
      const std::uint8_t byte = low[i % 64];
      const unsigned four = quarter < 2 ? byte & 15u : byte >> 4;
      const unsigned code = four | (high[i % 32] >> (2 * quarter) & 3u) << 4;
      const auto scale = static_cast<std::int8_t>(scales[i / 16]);
      out[half * 128 + i] =
          d * static_cast<float>(scale) * static_cast<float>(static_cast<int>(code) - 32);
    }
  }
}

void iq4_xs(const std::uint8_t* block, float* out) {
  const float d = float_at<Fp16>(block);
  for (std::size_t part = 0; part < 8; ++part) {
    const float scale = d * scale_of_iq4_xs(block, part);
    const std::uint8_t* codes = block + 8 + part * 16;
    for (std::size_t i = 0; i < 16; ++i) {
      out[part * 32 + i] = scale * kIq4Values[codes[i] & 15u];
      out[part * 32 + i + 16] = scale * kIq4Values[codes[i] >> 4];
    }
  }
}

}  // namespace

BlockDecoder superblock_decoder(TensorType type) {
  if (type == TensorType::kQ4K) return q4_k;
  if (type == TensorType::kQ5K) return q5_k;
  if (type == TensorType::kQ6K) return q6_k;
  return iq4_xs;
}

}  // namespace monograph::gguf
