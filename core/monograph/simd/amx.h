// What kernels on AMX share: the vocabulary, which is that of AVX-512, the configuration of the
// tiles; with the transposes that bring rows into tiles and back.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "monograph/simd/avx512.h"
#include "monograph/simd/transpose_avx512.h"
#include "monograph/simd/unrolled.h"

namespace monograph::simd {

// One configuration for all: eight tiles of 16 rows of 64 bytes. Kernels pad with zeros instead of
// narrowing tiles.
struct Amx : Avx512 {
  struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static_assert(sizeof(TileConfig) == 64);

  [[gnu::always_inline]] static void configure() {
    // In read-only data: GCC believes the instruction to read eight bytes and drops the rest of a
    // local object. Not a scope guard: its destructor would be a weak symbol of the unit.
    static constexpr TileConfig kConfig;
    _tile_loadconfig(&kConfig);
  }
  [[gnu::always_inline]] static void release() { _tile_release(); }
};

}  // namespace monograph::simd

namespace monograph {

inline constexpr std::size_t kTileBytes = 1024, kTileFloats = 256;

// The first n of 32 lanes, n > 0.
[[gnu::always_inline]] inline __mmask32 first_lanes(std::int64_t n) {
  return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
}

// Thirty-two floats as bf16, lane 0 of `low` first.
[[gnu::always_inline]] inline __m512i to_bf16_pair(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

}  // namespace monograph
