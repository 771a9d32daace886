// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/neon.h"

#include "monograph/kernels/linear/many_dx.h"
#include "monograph/kernels/linear/placed_neon.h"
#include "monograph/simd/lanes_neon.h"

namespace monograph {

template <>
struct RegisterBlock<simd::Neon> {
  using L = Lanes<simd::Neon>;
};

// For few rows the sizes of avx2.cpp. For many fewer accumulators than would fit: compilers load
// what they are multiplied by ahead, and spilled three of 24. No Arm processor has measured others.
template <>
struct FewBlock<simd::Neon> {
  static constexpr std::size_t kMost = 10, kCounts[] = {1, 2, 4}, kSums = 8;
  static constexpr std::size_t kDxMost = 5, kDxCounts[] = {1, 2}, kDxSums = 8;
  static constexpr std::size_t kDxPanel = 512;
};
template <>
struct ManyBlock<simd::Neon> {
  static constexpr std::size_t kVectors = 2, kColumns = 4, kPassRows = 192;
  static constexpr std::size_t kDxRows = 4, kDxVectors = 2, kDxDepth = 128;
};

template <>
const LinearKernels* find_linear<simd::Neon>(DType dtype, Pass pass) {
  return find_by_rows<simd::Neon>(dtype, pass);
}

}  // namespace monograph
