// The three element types of activations and dequantised weights.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monograph {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

constexpr std::size_t size_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
  }
  return "?";
}

}  // namespace monograph
