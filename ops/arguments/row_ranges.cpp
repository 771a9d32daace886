#include "arguments/row_ranges.h"

namespace monograph::ops {
namespace {

template <class T>
std::string listed(const std::vector<T>& numbers) {
  std::string text = "[";
  for (const T number : numbers)
    text.append(text.size() > 1 ? ", " : "").append(std::to_string(number));
  return text + "]";
}

}  // namespace

std::vector<std::size_t> starts_of(const char* op, const Tensor& starts, std::size_t count,
                                   std::size_t rows) {
  check_given(op, "starts", starts);
  const std::vector<std::int64_t> shape(starts.sizes().begin(), starts.sizes().end());
  STD_TORCH_CHECK(starts.scalar_type() == ScalarType::Long && starts.dim() == 1, op, ": starts is ",
                  name_of(starts.scalar_type()), " ", listed(shape), ", wanted int64 [n + 1]");
  STD_TORCH_CHECK(static_cast<std::size_t>(shape[0]) == count + 1, op, ": starts has ", shape[0],
                  " entries, wanted ", count + 1, " for ", count, " adapters");
  const auto* data = static_cast<const std::int64_t*>(starts.const_data_ptr());
  std::vector<std::int64_t> found;
  for (std::int64_t i = 0; i < shape[0]; ++i) found.push_back(data[i * starts.stride(0)]);
  bool fits = found.front() == 0 && static_cast<std::size_t>(found.back()) == rows;
  for (std::size_t i = 1; i < found.size(); ++i) fits = fits && found[i - 1] <= found[i];
  STD_TORCH_CHECK(fits, op, ": starts is ", listed(found), ", wanted ascending numbers from 0 to ",
                  rows, ", the rows");
  return {found.begin(), found.end()};
}

std::string entry_name(const char* list, std::size_t i) {
  return std::string(list).append("[").append(std::to_string(i)).append("]");
}

void check_entries(const char* op, const char* what, const std::vector<Tensor>& list,
                   std::size_t count) {
  STD_TORCH_CHECK(list.empty() || list.size() == count, op, ": ", what, " has ", list.size(),
                  " entries, wanted 0 or ", count, ", one for each adapter");
}

Factors factors_of(const char* op, const char* what, const std::vector<Tensor>& list) {
  Factors found;
  const Tensor* first = nullptr;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string name = entry_name(what, i);
    check_given(op, name.c_str(), list[i]);
    dtype_of(list[i].scalar_type(), op, name.c_str());
    STD_TORCH_CHECK(list[i].dim() == 2, op, ": ", name, " has ", list[i].dim(),
                    " dimensions, wanted two");
    const auto rows = static_cast<std::size_t>(list[i].size(0));
    const auto cols = static_cast<std::size_t>(list[i].size(1));
    found.owners.push_back(list[i]);
    LinearWeight weight;
    weight.packed.rows = rows;
    weight.packed.cols = cols;
    if (rows != 0 && cols != 0) {
      if (first == nullptr) first = &list[i];
      STD_TORCH_CHECK(list[i].scalar_type() == first->scalar_type(), op, ": ", name, " is ",
                      name_of(list[i].scalar_type()), ", wanted ", name_of(first->scalar_type()),
                      " as the others");
      weight = plain_weight(op, name.c_str(), list[i], rows, cols, found.owners.back());
    }
    found.weights.push_back(weight);
  }
  return found;
}

Vectors vectors_of(const char* op, const char* what, const std::vector<Tensor>& list,
                   std::size_t count, std::size_t size, DType dtype) {
  check_entries(op, what, list, count);
  Vectors found = {std::vector<const void*>(count, nullptr), {}};
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string name = entry_name(what, i);
    check_given(op, name.c_str(), list[i]);
    if (list[i].numel() == 0) continue;
    found.owners.push_back(vector_of(op, name.c_str(), list[i], size, dtype));
    found.data[i] = found.owners.back().matrix.data;
  }
  return found;
}

Matrix part_of(const Matrix& matrix, DType dtype, std::size_t first, std::size_t rows,
               std::size_t cols) {
  const auto* data = static_cast<const std::byte*>(matrix.data);
  return {data + first * matrix.stride * size_bytes(dtype), rows, cols, matrix.stride};
}

}  // namespace monograph::ops
