// The vocabulary on AMX: that of AVX-512, and a configuration in which all eight tiles are 16 rows
// of 64 bytes. Kernels pad with zeros instead of narrowing tiles.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "monograph/simd/avx512.h"

namespace monograph::simd {

struct Amx : Avx512 {
  struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(TileConfig) == 64);

  [[gnu::always_inline]] static void configure() {
    // In read-only data: GCC believes the instruction to read eight bytes and drops the rest of a
    // local.
    static constexpr TileConfig kConfig;
    _tile_loadconfig(&kConfig);
  }
  [[gnu::always_inline]] static void release() { _tile_release(); }
};

}  // namespace monograph::simd
