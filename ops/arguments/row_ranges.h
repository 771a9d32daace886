// Ranges of rows that belong to one adapter each, and the tensors that an adapter has, as the
// operators of many adapters take them.
#pragma once

#include <string>
#include <vector>

#include "arguments/linear.h"

namespace monograph::ops {

// int64 [count + 1] on the host, ascending from 0 to `rows`: the borders. Reads them.
std::vector<std::size_t> starts_of(const char* op, const Tensor& starts, std::size_t count,
                                   std::size_t rows);

// "b[3]"
std::string entry_name(const char* list, std::size_t i);

// A list with one entry for each adapter, or an empty one.
void check_entries(const char* op, const char* what, const std::vector<Tensor>& list,
                   std::size_t count);

// Plain matrices as weights, copies of those that do not lie in order; a matrix without elements
// has its shape alone. Those with elements are of one type.
struct Factors {
  std::vector<LinearWeight> weights;
  std::vector<Tensor> owners;
};
Factors factors_of(const char* op, const char* what, const std::vector<Tensor>& list);

// A vector of `size` for each adapter that has one, else nullptr.
struct Vectors {
  std::vector<const void*> data;
  std::vector<RowsArgument> owners;
};
Vectors vectors_of(const char* op, const char* what, const std::vector<Tensor>& list,
                   std::size_t count, std::size_t size, DType dtype);

// Rows [first, first + rows) and the first columns of a matrix of elements of `dtype`.
Matrix part_of(const Matrix& matrix, DType dtype, std::size_t first, std::size_t rows,
               std::size_t cols);

}  // namespace monograph::ops
