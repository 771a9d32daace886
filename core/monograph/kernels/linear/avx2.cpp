// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx2.h"

#include "monograph/kernels/linear/many_dx.h"
#include "monograph/kernels/linear/placed_avx2.h"
#include "monograph/simd/lanes_avx2.h"

namespace monograph {

template <>
struct RegisterBlock<simd::Avx2> {
  using L = Lanes<simd::Avx2>;
};

// At most 12 accumulators of 16 registers.
template <>
struct FewBlock<simd::Avx2> {
  static constexpr std::size_t kMost = 10, kCounts[] = {1, 2, 4}, kSums = 8;
  static constexpr std::size_t kDxMost = 5, kDxCounts[] = {1, 2}, kDxSums = 8;
  static constexpr std::size_t kDxPanel = 512;
};
template <>
struct ManyBlock<simd::Avx2> {
  static constexpr std::size_t kVectors = 3, kColumns = 4, kPassRows = 192;
  static constexpr std::size_t kDxRows = 6, kDxVectors = 2, kDxDepth = 128;
};

template <>
const LinearKernels* find_linear<simd::Avx2>(DType dtype, Pass pass) {
  return find_by_rows<simd::Avx2>(dtype, pass);
}

}  // namespace monograph
