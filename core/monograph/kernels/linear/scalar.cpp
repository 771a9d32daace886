// Compiled with the flags of the baseline and nothing else.
#include "monograph/simd/scalar.h"

#include "monograph/kernels/linear/generic.h"
#include "monograph/simd/lanes_scalar.h"

namespace monograph {

template <>
struct RegisterBlock<simd::Scalar> {
  using L = Lanes<simd::Scalar8>;
  static constexpr std::size_t kRows = 2, kDxRows = 2, kDxVectors = 2;
};

template const LinearKernels* find_linear<simd::Scalar>(DType, Pass);

}  // namespace monograph
