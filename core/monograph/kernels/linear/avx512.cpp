// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx512.h"

#include "monograph/kernels/linear/many_dx.h"
#include "monograph/kernels/linear/placed_avx512.h"
#include "monograph/simd/lanes_avx512.h"

namespace monograph {

template <>
struct RegisterBlock<simd::Avx512> {
  using L = Lanes<simd::Avx512>;
};

// At most 24 accumulators of 32 registers.
template <>
struct FewBlock<simd::Avx512> {
  static constexpr std::size_t kMost = 12, kCounts[] = {1, 2, 4, 8, 12}, kSums = 24;
  static constexpr std::size_t kDxMost = 16, kDxCounts[] = {1, 2, 4, 6, 8, 12, 16}, kDxSums = 24;
  static constexpr std::size_t kDxPanel = 512;
};
template <>
struct ManyBlock<simd::Avx512> {
  static constexpr std::size_t kVectors = 3, kColumns = 8, kPassRows = 240;
  static constexpr std::size_t kDxRows = 6, kDxVectors = 4, kDxDepth = 64;
};

template <>
const LinearKernels* find_linear<simd::Avx512>(DType dtype, Pass pass) {
  return find_by_rows<simd::Avx512>(dtype, pass);
}

}  // namespace monograph
