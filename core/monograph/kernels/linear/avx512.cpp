// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx512.h"

#include "monograph/kernels/linear/few_decode_avx512.h"
#include "monograph/kernels/linear/many_dx.h"
#include "monograph/simd/lanes_avx512.h"

namespace monograph {

template <>
struct RegisterBlock<simd::Avx512> {
  using L = Lanes<simd::Avx512>;
};

// At most 24 accumulators of 32 registers.
template <>
struct FewBlock<simd::Avx512> {
  static constexpr std::size_t kMost = 16, kRows = 8, kSums = 24, kDxRows = 6, kDxPanel = 512;
};
template <>
struct ManyBlock<simd::Avx512> {
  static constexpr std::size_t kVectors = 3, kColumns = 8, kDxRows = 12, kPassRows = 240;
};

template <>
const LinearKernels* find_linear<simd::Avx512>(DType dtype, Pass pass) {
  return find_by_rows<simd::Avx512>(dtype, pass);
}

}  // namespace monograph
