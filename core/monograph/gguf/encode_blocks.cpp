#include "monograph/gguf/encode_blocks.h"

#include <cstring>
#include <limits>

#include "monograph/base/error.h"
#include "monograph/base/float_types.h"
#include "monograph/gguf/blocks.h"

namespace monograph::gguf {
namespace {

template <class T>
void store(const float* values, std::size_t count, std::uint8_t* out) {
  for (std::size_t i = 0; i < count; ++i) {
    const T stored = from_float<T>(values[i]);
    std::memcpy(out + i * sizeof stored, &stored, sizeof stored);
  }
}

}  // namespace

bool is_written(TensorType type) {
  return type != TensorType::kQ4Min && type != TensorType::kIQ4 && type != TensorType::kIQ4Xs;
}

float largest_magnitude(TensorType type) {
  switch (type) {
    case TensorType::kQ8:
      return kLargestQ8;
    case TensorType::kQ4:
      return kLargestQ4;
    case TensorType::kQ5:
      return kLargestQ5;
    case TensorType::kQ5Min:
      return kLargestQ5Min;
    case TensorType::kQ4K:
    case TensorType::kQ5K:
      return kLargestWithMinimum;
    case TensorType::kQ6K:
      return kLargestQ6K;
    case TensorType::kF16:
      return 65519.996f;  // what rounds to the largest, 65504
    default:
      break;
  }
  return std::numeric_limits<float>::max();
}

void encode(TensorType type, const float* values, std::size_t count, std::uint8_t* out) {
  switch (type) {
    case TensorType::kQ8:
      return encode_q8_0(values, count / kBlock, out);
    case TensorType::kQ4:
      return encode_q4_0(values, count / kBlock, out);
    case TensorType::kQ5:
      return encode_q5_0(values, count / kBlock, out);
    case TensorType::kQ5Min:
      return encode_q5_1(values, count / kBlock, out);
    case TensorType::kMxfp4:
      return encode_mxfp4(values, count / kBlock, out);
    case TensorType::kQ4K:
      return encode_q4_k(values, count / kSuperblock, out);
    case TensorType::kQ5K:
      return encode_q5_k(values, count / kSuperblock, out);
    case TensorType::kQ6K:
      return encode_q6_k(values, count / kSuperblock, out);
    case TensorType::kF32:
      return store<float>(values, count, out);
    case TensorType::kF16:
      return store<Fp16>(values, count, out);
    case TensorType::kBF16:
      return store<Bf16>(values, count, out);
    default:
      MONOGRAPH_ASSERT(false);  // see is_written
  }
}

}  // namespace monograph::gguf
