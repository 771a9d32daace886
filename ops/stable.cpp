#include "stable.h"

#include <atomic>
#include <cmath>
#include <exception>
#include <functional>
#include <string>

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
  refuse(op, ": ", what, " has dtype ", name_of(type), ", wanted bfloat16, float16 or float32");
}

const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e8m0fnu:
      return "float8_e8m0fnu";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      return "another type";
  }
}

void check_given(const char* op, const char* what, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.defined(), op, ": ", what, " is None, wanted a tensor");
}

float float32_of(const char* op, const char* what, double number) {
  const float rounded = static_cast<float>(number);
  STD_TORCH_CHECK(std::isfinite(rounded) && (rounded != 0) == (number != 0), op, ": ", what, " is ",
                  number, ", wanted a number in the range of float32");
  return rounded;
}

namespace {

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

}  // namespace

Tensor empty(const char* op, const Tensor& like, const std::vector<std::int64_t>& shape,
             ScalarType dtype) {
  try {
    return torch::stable::new_empty(like, shape, dtype);
  } catch (const std::exception&) {
    refuse(op, ": no memory for a result of shape ", text_of(shape), " in ", name_of(dtype));
  }
}

bool overlap(const Tensor& a, const Tensor& b) {
  const auto* a_begin = static_cast<const std::byte*>(a.const_data_ptr());
  const auto* b_begin = static_cast<const std::byte*>(b.const_data_ptr());
  const auto bytes = [](const Tensor& t) {
    return static_cast<std::size_t>(t.numel()) * static_cast<std::size_t>(t.element_size());
  };
  const std::less<const std::byte*> before;
  return bytes(a) > 0 && bytes(b) > 0 && before(a_begin, b_begin + bytes(b)) &&
         before(b_begin, a_begin + bytes(a));
}

void TorchParallelFor::operator()(std::size_t count, std::size_t grain, ParallelBody body) const {
  std::atomic_flag failed;
  std::exception_ptr first;
  torch::stable::parallel_for(0, static_cast<std::int64_t>(count), static_cast<std::int64_t>(grain),
                              [&](std::int64_t begin, std::int64_t end) noexcept {
                                try {
                                  body(static_cast<std::size_t>(begin),
                                       static_cast<std::size_t>(end));
                                } catch (...) {
                                  if (!failed.test_and_set()) first = std::current_exception();
                                }
                              });
  if (first) std::rethrow_exception(first);
}

}  // namespace monograph::ops
