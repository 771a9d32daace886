// bf16, fp16 or fp32 -> packed values and one fp32 scale a block, by the rules of the format (see
// its header). The same bits on every instruction set and for any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/dtype.h"
#include "cpu/parallel.h"
#include "cpu/variant.h"

namespace monograph {

enum class NonFinite : std::uint8_t {
  kError,     // stop and name the first position
  kSaturate,  // leave them out of the scale; then NaN takes the code of 0, +-inf that of +-scale
};

struct QuantizeJob {
  Format format;
  DType dtype;
  const void* input;  // `elements` values, contiguous
  std::size_t elements;
  std::size_t block;
  NonFinite nonfinite;
  std::uint8_t* values;  // packed_bytes(format, elements)
  float* scales;         // one a block, ceil(elements / block)
};

inline constexpr std::size_t kAllFinite = SIZE_MAX;

// Quantises blocks [first, last). Returns the index of the first non-finite element met under
// NonFinite::kError, else kAllFinite.
using QuantizeFn = std::size_t(const QuantizeJob& job, std::size_t first, std::size_t last);

const std::vector<Variant<QuantizeFn>>& quantize_variants();

// The index of the first non-finite element, if job.nonfinite forbids them and there is one; the
// outputs are then not to be used.
std::optional<std::size_t> quantize(const QuantizeJob& job, ParallelFor parallel_for);

}  // namespace monograph
