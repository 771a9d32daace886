// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx512.h"

#include "monograph/kernels/linear/few_decode_avx512.h"
#include "monograph/kernels/linear/few_dx.h"
#include "monograph/kernels/linear/few_forward.h"
#include "monograph/kernels/linear/generic.h"
#include "monograph/kernels/linear/many_dx.h"
#include "monograph/kernels/linear/many_forward.h"
#include "monograph/simd/lanes_avx512.h"

namespace monograph {

// 24 accumulators of 32 registers.
template <>
struct RegisterBlock<simd::Avx512> {
  using L = Lanes<simd::Avx512>;
  static constexpr std::size_t kRows = 6, kDxRows = 6, kDxVectors = 2;
};

template <>
struct FewBlock<simd::Avx512> {
  static constexpr std::size_t kRows = 8, kSums = 24, kDxRows = 6, kDxPanel = 512;
};

template <>
struct ManyBlock<simd::Avx512> {
  static constexpr std::size_t kVectors = 3, kColumns = 8, kDxRows = 12, kPassRows = 240;
};

template <class T>
struct FewRows<simd::Avx512, T> {
  static constexpr std::size_t kMost = 16, kMostDx = 16;
  static constexpr const LinearKernels* kForward = &kFewForwardKernels<simd::Avx512, T>;
  static constexpr const LinearKernels* kDx = &kFewDxKernels<simd::Avx512, T>;
};

template <>
const LinearKernels* find_linear<simd::Avx512>(DType dtype, Pass pass) {
  return with_type(dtype, [&]<class T>() {
    static_assert(kManyForwardKernels<simd::Avx512, T>.has_sizes());
    return pass == Pass::kForward ? &kManyForwardKernels<simd::Avx512, T>
                                  : &kManyDxKernels<simd::Avx512, T>;
  });
}

}  // namespace monograph
