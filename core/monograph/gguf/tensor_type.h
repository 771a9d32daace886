// How ggml stores the elements of a tensor: plain floats, or blocks of 32 with a scale of their
// own.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace monograph::gguf {

// The numbers of ggml_type, as they stand in files.
enum class TensorType : std::uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4 = 2,
  kQ8 = 8,
  kBF16 = 30,
  kMxfp4 = 39,
};

struct TensorTypeInfo {
  TensorType type;
  std::string_view name;         // "q8_0"
  std::uint64_t block_elements;  // 1 for plain floats
  std::uint64_t block_bytes;
  std::uint32_t file_type;  // general.file_type of a model whose matrices have it
};

inline constexpr std::array kTensorTypes = {
    TensorTypeInfo{TensorType::kF32, "f32", 1, 4, 0},
    TensorTypeInfo{TensorType::kF16, "f16", 1, 2, 1},
    TensorTypeInfo{TensorType::kBF16, "bf16", 1, 2, 32},
    TensorTypeInfo{TensorType::kQ8, "q8_0", 32, 34, 7},
    TensorTypeInfo{TensorType::kQ4, "q4_0", 32, 18, 2},
    TensorTypeInfo{TensorType::kMxfp4, "mxfp4", 32, 17, 38},
};

constexpr const TensorTypeInfo& info_of(TensorType type) {
  for (const TensorTypeInfo& row : kTensorTypes) {
    if (row.type == type) return row;
  }
  return kTensorTypes.front();  // every enumerator has a row
}

constexpr const TensorTypeInfo* find_tensor_type(std::string_view name) {
  for (const TensorTypeInfo& row : kTensorTypes) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

constexpr std::uint64_t size_bytes(TensorType type, std::uint64_t elements) {
  const TensorTypeInfo& info = info_of(type);
  return elements / info.block_elements * info.block_bytes;
}

}  // namespace monograph::gguf
