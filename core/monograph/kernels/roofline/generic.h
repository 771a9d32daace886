// The loops, written once for each vocabulary that has the instructions.
#pragma once

#include <cstring>

#include "monograph/kernels/roofline/roofline.h"
#include "monograph/simd/lanes.h"
#include "monograph/simd/unrolled.h"

namespace monograph {

template <class V>
void move_with(const std::uint8_t* in, std::size_t in_bytes, std::uint8_t* out,
               std::size_t out_bytes) {
  const std::size_t repeat = in_bytes < 16 ? 0 : out_bytes / (in_bytes / 16 * 16);
  std::size_t o = 0;
  for (std::size_t i = 0; i + 16 <= in_bytes; i += 16)
    for (std::size_t r = 0; r < repeat && o + 16 <= out_bytes; ++r, o += 16)
      std::memcpy(out + o, in + i, 16);
}

template <class V>
double tile_products_with(std::size_t steps);

// Chains stay within [1, 2]: x becomes x / 2 + 3 / 4. Two ports with a latency of four want eight.
template <class V>
double vector_products_with(std::size_t steps) {
  using L = Lanes<V>;
  constexpr std::size_t kChains = 12;
  const volatile float factor = 0.5f, term = 0.75f;  // or a compiler would know the results
  const typename L::F32 a = L::set(factor), b = L::set(term);
  typename L::F32 chains[kChains];
  unrolled<kChains>([&](auto i) __attribute__((always_inline)) {
    chains[i] = L::set(1.0f + static_cast<float>(i()) / kChains);
  });
  for (std::size_t step = 0; step < steps; ++step)
    unrolled<kChains>([&](auto i)
                          __attribute__((always_inline)) { chains[i] = L::fma(chains[i], a, b); });
  float sink = 0.0f;
  unrolled<kChains>([&](auto i)
                        __attribute__((always_inline)) { sink += L::reduce_add(chains[i]); });
  const double operations = static_cast<double>(steps) * 2 * kChains * L::kLanes;
  return operations + 0 * static_cast<double>(sink);
}

}  // namespace monograph
