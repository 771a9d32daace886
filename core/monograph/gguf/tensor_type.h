// How ggml stores the elements of a tensor: plain floats, blocks of 32 with a scale of their own,
// or blocks of 256 whose parts have scales of few bits.
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
  kQ4Min = 3,  // Q4_1: with a minimum
  kQ5 = 6,
  kQ5Min = 7,
  kQ8 = 8,
  kQ4K = 12,
  kQ5K = 13,
  kQ6K = 14,
  kIQ4 = 20,    // IQ4_NL: sixteen values of a table
  kIQ4Xs = 23,  // the same in blocks of 256
  kBF16 = 30,
  kMxfp4 = 39,
};

struct TensorTypeInfo {
  TensorType type;
  std::string_view name;         // "q8_0"
  std::uint64_t block_elements;  // 1 for plain floats
  std::uint64_t block_bytes;
  std::uint32_t file_type;  // general.file_type of a model whose matrices have it
  // As `monograph export --type` says it; empty: only read, or written in some tensors of a
  // mixture.
  std::string_view export_name;
};

inline constexpr std::array kTensorTypes = {
    TensorTypeInfo{TensorType::kF32, "f32", 1, 4, 0, "f32"},
    TensorTypeInfo{TensorType::kF16, "f16", 1, 2, 1, "f16"},
    TensorTypeInfo{TensorType::kBF16, "bf16", 1, 2, 32, "bf16"},
    TensorTypeInfo{TensorType::kQ8, "q8_0", 32, 34, 7, "q8_0"},
    TensorTypeInfo{TensorType::kQ4, "q4_0", 32, 18, 2, "q4_0"},
    TensorTypeInfo{TensorType::kMxfp4, "mxfp4", 32, 17, 38, "mxfp4"},
    TensorTypeInfo{TensorType::kQ4Min, "q4_1", 32, 20, 3, ""},
    TensorTypeInfo{TensorType::kQ5, "q5_0", 32, 22, 8, ""},
    TensorTypeInfo{TensorType::kQ5Min, "q5_1", 32, 24, 9, ""},
    TensorTypeInfo{TensorType::kQ4K, "q4_k", 256, 144, 15, "q4_k_m"},
    TensorTypeInfo{TensorType::kQ5K, "q5_k", 256, 176, 17, "q5_k_m"},
    TensorTypeInfo{TensorType::kQ6K, "q6_k", 256, 210, 18, "q6_k"},
    TensorTypeInfo{TensorType::kIQ4, "iq4_nl", 32, 18, 25, ""},
    TensorTypeInfo{TensorType::kIQ4Xs, "iq4_xs", 256, 136, 30, ""},
};

constexpr const TensorTypeInfo& info_of(TensorType type) {
  for (const TensorTypeInfo& row : kTensorTypes) {
    if (row.type == type) return row;
  }
  return kTensorTypes.front();  // every enumerator has a row
}

// What `monograph export` makes matrices of, by the name there; null if there is none. q4_k_m and
// q5_k_m are mixtures: mixture.h.
constexpr const TensorTypeInfo* find_written_type(std::string_view name) {
  for (const TensorTypeInfo& row : kTensorTypes) {
    if (!name.empty() && row.export_name == name) return &row;
  }
  return nullptr;
}

// By its number in a file; null if it is not known.
constexpr const TensorTypeInfo* find_tensor_type(std::uint32_t number) {
  for (const TensorTypeInfo& row : kTensorTypes) {
    if (static_cast<std::uint32_t>(row.type) == number) return &row;
  }
  return nullptr;
}

// Types of ggml that are not read, by their names.
struct UnreadType {
  std::uint32_t number;
  std::string_view name;
};
inline constexpr std::array kUnreadTypes = {
    UnreadType{9, "q8_1"},     UnreadType{10, "q2_k"},    UnreadType{11, "q3_k"},
    UnreadType{15, "q8_k"},    UnreadType{16, "iq2_xxs"}, UnreadType{17, "iq2_xs"},
    UnreadType{18, "iq3_xxs"}, UnreadType{19, "iq1_s"},   UnreadType{21, "iq3_s"},
    UnreadType{22, "iq2_s"},   UnreadType{24, "i8"},      UnreadType{25, "i16"},
    UnreadType{26, "i32"},     UnreadType{27, "i64"},     UnreadType{28, "f64"},
    UnreadType{29, "iq1_m"},   UnreadType{34, "tq1_0"},   UnreadType{35, "tq2_0"},
};
constexpr std::string_view unread_name(std::uint32_t number) {
  for (const UnreadType& row : kUnreadTypes) {
    if (row.number == number) return row.name;
  }
  return "which ggml does not have";
}

constexpr std::uint64_t size_bytes(TensorType type, std::uint64_t elements) {
  const TensorTypeInfo& info = info_of(type);
  return elements / info.block_elements * info.block_bytes;
}

}  // namespace monograph::gguf
