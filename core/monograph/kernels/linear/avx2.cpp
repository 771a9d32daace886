// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx2.h"

#include "monograph/kernels/linear/generic.h"
#include "monograph/simd/lanes_avx2.h"

namespace monograph {

// 12 accumulators of 16 registers.
template <>
struct RegisterBlock<simd::Avx2> {
  using L = Lanes<simd::Avx2>;
  static constexpr std::size_t kRows = 3, kDxRows = 3, kDxVectors = 2;
};

template const LinearKernels* find_linear<simd::Avx2>(DType, Pass);

}  // namespace monograph
