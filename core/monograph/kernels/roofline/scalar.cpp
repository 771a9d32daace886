#include "monograph/cpu/tags.h"
#include "monograph/kernels/roofline/generic.h"

namespace monograph {

template void move_with<simd::Scalar>(const std::uint8_t*, std::size_t, std::uint8_t*, std::size_t);

}  // namespace monograph
