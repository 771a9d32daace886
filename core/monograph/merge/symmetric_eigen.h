// Eigenvalues and eigenvectors of a small symmetric matrix, in fp64, in a fixed order.
#pragma once

#include <cstddef>
#include <vector>

namespace monograph {

struct SymmetricEigen {
  std::vector<double> values;   // descending
  std::vector<double> vectors;  // row i belongs to values[i]; orthonormal
};

// `matrix` is size x size and positive semi-definite up to rounding.
SymmetricEigen symmetric_eigen(std::vector<double> matrix, std::size_t size);

}  // namespace monograph
