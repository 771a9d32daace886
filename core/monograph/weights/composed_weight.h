// A weight whose elements lie in other weights: matrices one behind the other, each of them
// transposed, or pairs of them whose rows take turns. Nothing is copied; read_elements gathers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "monograph/weights/weight.h"

namespace monograph {

struct ComposedWeight {
  std::vector<Weight> sources;  // their elements one behind the other; one if transposed
  bool transposed = false;      // the weight is [.., a, b], its source [.., b, a]
  // Of each two sources the first has the even rows of a matrix, the second the odd ones.
  bool alternate = false;

  bool is_readable() const;
  // The bytes that elements [begin, end) of the weight are read from, at least.
  std::vector<std::span<const std::uint8_t>> bytes(std::uint64_t begin, std::uint64_t end) const;
};

// `sources` have one shape, type and format; together they are `shape`.
Weight stacked(std::string name, std::vector<std::uint64_t> shape, std::vector<Weight> sources);

// The same of pairs of matrices: row 2 i is row i of the first, row 2 i + 1 that of the second.
Weight stacked_in_turns(std::string name, std::vector<std::uint64_t> shape,
                        std::vector<Weight> sources);

// The last two dimensions of `weight`, of at least two, exchanged.
Weight transposed(const Weight& weight);

// read_elements of a weight that is composed.
void read_composed(const Weight& weight, std::uint64_t begin, std::uint64_t end, DType dtype,
                   void* out);

}  // namespace monograph
