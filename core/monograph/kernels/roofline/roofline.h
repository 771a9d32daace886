// The roofline that benchmarks are measured against: not used by any operator of users.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monograph {

// Reads every byte of `in` and writes every byte of `out` once, in order, with 64-byte stores: the
// traffic of a dequantisation without its arithmetic. Pieces of 16 bytes of `in` are repeated.
using MoveFn = void(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
                    std::size_t out_bytes);
void move_bytes(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
                std::size_t out_bytes);

// Multiplies tiles that stay in the first-level cache, `steps` times four products of 16x32 by
// 32x16, and returns the floating-point operations done; 0 where there is no AMX.
double tile_products(std::size_t steps);

// Twelve chains of multiply-adds on vectors that stay in registers, `steps` links each; returns the
// floating-point operations done.
double vector_products(std::size_t steps);

}  // namespace monograph
