// Compiled with the flags of this instruction set and nothing else.
#include "monograph/simd/amx.h"

#include <immintrin.h>

#include "monograph/kernels/roofline/generic.h"

namespace monograph {

template <>
double tile_products_with<simd::Amx>(std::size_t steps) {
  constexpr std::size_t kDepth = 4;  // 16 KiB of tiles: well inside the first-level cache
  alignas(64) static thread_local std::uint8_t tiles[kDepth * 4096];
  // bf16 numbers in [1, 2): a loop over zeros draws less power and runs 1.2x faster than real work.
  std::uint32_t state = 1;
  for (std::size_t i = 0; i < sizeof tiles; i += 2) {
    state = state * 1664525 + 1013904223;
    tiles[i] = static_cast<std::uint8_t>(state >> 24);
    tiles[i + 1] = 0x3f;
  }
  asm volatile("" ::: "memory");  // the tile loads do not tell the compiler that they read memory
  simd::Amx::configure();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::size_t step = 0; step < steps; ++step) {
    const std::uint8_t* p = tiles + step % kDepth * 4096;
    _tile_loadd(4, p, 64);
    _tile_loadd(6, p + 2048, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, p + 3072, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, p + 1024, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) float sink[256];
  _tile_stored(0, sink, 64);
  simd::Amx::release();
  return static_cast<double>(steps) * 4 * 2 * 16 * 16 * 32 + 0 * static_cast<double>(sink[0]);
}

}  // namespace monograph
