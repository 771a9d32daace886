// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/avx512_bf16.h"

#include "monograph/kernels/linear/bf16_pairs.h"

namespace monograph {

template <>
const LinearKernels* find_linear<simd::Avx512Bf16>(DType dtype, Pass pass) {
  return find_pairs<simd::Avx512Bf16>(dtype, pass);
}

}  // namespace monograph
