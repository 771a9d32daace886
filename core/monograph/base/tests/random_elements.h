#pragma once
// What tests of kernels over floats begin with: drawn elements of a type, and its rounding.
#include <random>
#include <vector>

#include "monograph/base/float_types.h"

namespace monograph {

/// Normal numbers around `mean`, each rounded to T.
template <class T>
std::vector<T> random_elements(std::size_t count, unsigned seed, float mean = 0.2f,
                               float deviation = 1.5f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(mean, deviation);
  std::vector<T> values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(from_float<T>(normal(random)));
  return values;
}

/// Half the distance between 1 and the next number of T.
template <class T>
constexpr double kUnit = sizeof(T) == 4                    ? 0x1p-24
                         : dtype_of<T> == DType::kBFloat16 ? 0x1p-8
                                                           : 0x1p-11;

}  // namespace monograph
