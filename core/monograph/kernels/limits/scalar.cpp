#include "monograph/kernels/limits/generic.h"
#include "monograph/simd/tags.h"

namespace monograph {

template void move_with<simd::Scalar>(const std::uint8_t*, std::size_t, std::uint8_t*, std::size_t);

}  // namespace monograph
