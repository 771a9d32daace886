// What rotary positions turn by: frequencies of the pairs of a head, and the cosine and sine of
// each token's angles.
//
// Frequencies are computed in fp64 and rounded once to fp32. An angle is position * frequency in
// fp32, as transformers has it; its cosine and sine are those of fp64, times `scaling`, rounded to
// fp32 and then to the type of the activations. No vector code: the same bits for any number of
// threads and, up to the last bit of a fp64 cosine, on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"

namespace monograph {

// The numbers travel in graphs and are never reused.
enum class RopeKind : std::uint8_t { kDefault = 0, kLinear = 1, kLlama3 = 2, kYarn = 3 };

// How a config says that frequencies are scaled; numbers that a kind does not name are not read.
struct RopeScaling {
  RopeKind kind = RopeKind::kDefault;
  double theta = 10000;
  double factor = 1;                             // linear, llama3, yarn
  double low_frequency = 1, high_frequency = 4;  // llama3
  double original_positions = 8192;              // llama3, yarn: of the first training
  double beta_fast = 32, beta_slow = 1;          // yarn
  bool truncate = true;                          // yarn: the ends of its ramp are whole numbers
};

// Of the pairs i and i + size / 2 of a head of `size`:
//   default  1 / theta^(2 i / size)
//   linear   that / factor
//   llama3   that / factor where a turn takes more than original / low_frequency tokens, itself
//            below original / high_frequency, between them (1 - s) f / factor + s f with
//            s = (original / turn - low) / (high - low)
//   yarn     (1 - e) f / factor + e f with e falling from 1 to 0 between the pairs that make
//            beta_fast and beta_slow turns in the original positions
std::vector<float> rotary_frequencies(const RopeScaling& scaling, std::size_t size);

struct RotaryAngles {
  DType dtype;
  const std::int64_t* positions;  // [tokens]
  std::size_t tokens;
  const float* frequencies;  // [half]
  std::size_t half;
  double scaling;
  void *cos, *sin;  // [tokens, 2 half] in `dtype`: the angles twice
};

void rotary_angles(const RotaryAngles& job, ParallelFor parallel_for);

}  // namespace monograph
