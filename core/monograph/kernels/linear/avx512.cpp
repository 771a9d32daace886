// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx512.h"

#include "monograph/kernels/linear/generic.h"
#include "monograph/simd/lanes_avx512.h"

namespace monograph {

// 24 accumulators of 32 registers.
template <>
struct RegisterBlock<simd::Avx512> {
  using L = Lanes<simd::Avx512>;
  static constexpr std::size_t kRows = 6, kDxRows = 6, kDxVectors = 2;
};

template const LinearKernels* find_linear<simd::Avx512>(DType, Pass);

}  // namespace monograph
