// Compiled with the flags of this instruction set and nothing else.
#include "monograph/kernels/roofline/generic.h"
#include "monograph/simd/lanes_neon.h"

namespace monograph {

template void move_with<simd::Neon>(const std::uint8_t*, std::size_t, std::uint8_t*, std::size_t);
template double vector_products_with<simd::Neon>(std::size_t);

}  // namespace monograph
