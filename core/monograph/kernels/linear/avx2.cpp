// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx2.h"

#include "monograph/kernels/linear/few_decode_avx2.h"
#include "monograph/kernels/linear/few_dx.h"
#include "monograph/kernels/linear/few_forward.h"
#include "monograph/kernels/linear/generic.h"
#include "monograph/kernels/linear/many_dx.h"
#include "monograph/kernels/linear/many_forward.h"
#include "monograph/simd/lanes_avx2.h"

namespace monograph {

// 12 accumulators of 16 registers.
template <>
struct RegisterBlock<simd::Avx2> {
  using L = Lanes<simd::Avx2>;
  static constexpr std::size_t kRows = 3, kDxRows = 3, kDxVectors = 2;
};

template <>
struct FewBlock<simd::Avx2> {
  static constexpr std::size_t kRows = 4, kSums = 8, kDxRows = 2, kDxPanel = 512;
};

template <>
struct ManyBlock<simd::Avx2> {
  static constexpr std::size_t kVectors = 3, kColumns = 4, kDxRows = 6, kPassRows = 192;
};

template <class T>
struct FewRows<simd::Avx2, T> {
  static constexpr std::size_t kMost = 16, kMostDx = 16;
  static constexpr const LinearKernels* kForward = &kFewForwardKernels<simd::Avx2, T>;
  static constexpr const LinearKernels* kDx = &kFewDxKernels<simd::Avx2, T>;
};

template <>
const LinearKernels* find_linear<simd::Avx2>(DType dtype, Pass pass) {
  return with_type(dtype, [&]<class T>() {
    static_assert(kManyForwardKernels<simd::Avx2, T>.has_sizes());
    return pass == Pass::kForward ? &kManyForwardKernels<simd::Avx2, T>
                                  : &kManyDxKernels<simd::Avx2, T>;
  });
}

}  // namespace monograph
