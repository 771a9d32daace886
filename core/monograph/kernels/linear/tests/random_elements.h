// Elements for tests: normally distributed, rounded to their type, the same for the same seed.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "monograph/base/float_types.h"

namespace monograph {

inline std::vector<std::uint8_t> random_elements(DType dtype, std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint8_t> bytes(count * size_bytes(dtype));
  for (std::size_t i = 0; i < count; ++i)
    with_type(dtype, [&]<class T>() {
      const T element = from_float<T>(normal(random));
      std::memcpy(bytes.data() + i * sizeof(T), &element, sizeof(T));
    });
  return bytes;
}

}  // namespace monograph
