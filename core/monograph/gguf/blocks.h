// Blocks of ggml: 32 elements of a row with one scale. Each encoder gives the bytes of ggml's
// reference (and of PyPI's gguf) wherever those are defined; input is finite.
//
//   Q8_0   34 bytes: scale fp16 = absmax / 127, then 32 signed bytes round(x / scale), halves away
//          from zero
//   Q4_0   18 bytes: scale fp16 = m / -8 with m the value of the largest magnitude (the first of
//          equal ones), then 16 bytes; byte i holds element i below and element i + 16 above, each
//          trunc(x / scale + 8.5), at most 15; the value is (code - 8) * scale
//   Q5_0   22 bytes: scale fp16 = m / -16, 32 fifth bits, 16 bytes as in Q4_0; trunc(x / scale
//   + 16.5),
//          at most 31
//   Q5_1   24 bytes: scale fp16 = (largest - smallest) / 31, minimum fp16 = smallest, then as Q5_0;
//          trunc((x - smallest) / scale + 0.5); the value is code * scale + minimum
//   MXFP4  17 bytes: scale E8M0 = floor(log2(absmax)) - 2, then 16 bytes as in Q4_0 of E2M1 codes,
//          the nearest value, the smaller magnitude of two equally near; never the code of -0
//
// The quotients are computed with the scale in fp32, before it is rounded, as a product with its
// inverse. Beyond the reference: an inverse that overflows counts as zero, so that the block is
// zero, and an MXFP4 scale below 2^-127 is 2^-127.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "monograph/gguf/tensor_type.h"

namespace monograph::gguf {

inline constexpr std::size_t kBlock = 32, kSuperblock = 256;

// The largest magnitude whose scale is a finite fp16 number.
inline constexpr float kLargestQ8 = 65504.0f * 127;
inline constexpr float kLargestQ4 = 65504.0f * 8;
inline constexpr float kLargestQ5 = 65504.0f * 16;
inline constexpr float kLargestQ5Min = 65504.0f / 2;         // the minimum, and 31 steps from it
inline constexpr float kLargestWithMinimum = 65504.0f * 63;  // Q4_K, Q5_K
inline constexpr float kLargestQ6K = 65504.0f * 127 * 31;

// Twice the magnitudes of E2M1; the scale is halved for it, which 2^-127 can be too.
inline constexpr float kTwiceE2m1[8] = {0, 1, 2, 3, 4, 6, 8, 12};
// 2^(exponent - 128), also where that is subnormal.
inline float half_of_e8m0(std::uint32_t exponent) {
  return std::bit_cast<float>(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}

// `values`: blocks * 32 floats; `out`: blocks * block_bytes.
void encode_q8_0(const float* values, std::size_t blocks, std::uint8_t* out);
void encode_q4_0(const float* values, std::size_t blocks, std::uint8_t* out);
void encode_mxfp4(const float* values, std::size_t blocks, std::uint8_t* out);
void encode_q5_0(const float* values, std::size_t blocks, std::uint8_t* out);
void encode_q5_1(const float* values, std::size_t blocks, std::uint8_t* out);

// Blocks of 256 elements: the bytes are ours, with no larger squared error than those of ggml
// (k_minimum.cpp, q6_k.cpp).
void encode_q4_k(const float* values, std::size_t blocks, std::uint8_t* out);
void encode_q5_k(const float* values, std::size_t blocks, std::uint8_t* out);
void encode_q6_k(const float* values, std::size_t blocks, std::uint8_t* out);

}  // namespace monograph::gguf
