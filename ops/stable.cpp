#include "stable.h"

namespace monograph::ops {

DType dtype_of(ScalarType type, const char* op, const char* what) {
  switch (type) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      break;
  }
  STD_TORCH_CHECK(false, op, ": ", what, " has dtype ", name_of(type),
                  ", wanted bfloat16, float16 or float32");
}

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    default:
      return "another type";
  }
}

void TorchParallelFor::operator()(std::size_t count, std::size_t grain, ParallelBody body) const {
  torch::stable::parallel_for(0, static_cast<std::int64_t>(count), static_cast<std::int64_t>(grain),
                              [&](std::int64_t begin, std::int64_t end) {
                                body(static_cast<std::size_t>(begin),
                                     static_cast<std::size_t>(end));
                              });
}

}  // namespace monograph::ops
