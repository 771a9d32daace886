// What the elements of ggml's blocks can become while their scales stay.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/gguf/tensor_type.h"

namespace monograph::gguf {

// Element i is scale[i] * level - minimum[i], rounded once to fp32, as decode() has it. The level
// of code c is lowest + c, or levels[c].
struct BlockGrid {
  std::vector<float> scale, minimum;
  int lowest = 0;
  unsigned codes = 0;
  const float* levels = nullptr;  // null: whole numbers

  // The code whose value is nearest to x, the lower of two; of a scale of 0 that of level 0.
  std::uint8_t nearest(std::size_t i, double x) const;
  float value(std::size_t i, std::uint8_t code) const;
  // Whether x lies within half a step of the values of element i.
  bool reaches(std::size_t i, double x) const;
};

// Of `count` blocks; not for plain floats.
BlockGrid block_grid(TensorType type, const std::uint8_t* blocks, std::size_t count);

// One code an element into `count` blocks, whose scales stay as they are.
void set_codes(TensorType type, const std::uint8_t* codes, std::size_t count, std::uint8_t* blocks);

}  // namespace monograph::gguf
