#include "monograph/kernels/roofline/generic.h"
#include "monograph/simd/lanes_scalar.h"

namespace monograph {

template void move_with<simd::Scalar>(const std::uint8_t*, std::size_t, std::uint8_t*, std::size_t);
template double vector_products_with<simd::Scalar>(std::size_t);

}  // namespace monograph
