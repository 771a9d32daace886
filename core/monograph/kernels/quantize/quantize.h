// bf16, fp16 or fp32 -> packed values and one scale per block, by the rules of the format (see its
// header). The same bits on every instruction set and for any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"
#include "monograph/formats/scaling.h"
#include "monograph/kernels/keys.h"

namespace monograph {

enum class NonFinite : std::uint8_t {
  kError,     // stop and name the first position
  kSaturate,  // leave them out of the scale; then NaN takes the code of 0, +-inf that of +-scale
};

struct QuantizeJob {
  Format format;  // FormatInfo::kernels
  DType dtype;
  const void* input;  // `elements` values, contiguous
  std::size_t elements;
  std::size_t block;
  NonFinite nonfinite;
  std::uint8_t* values;  // packed_bytes(format, elements)
  std::uint8_t* scales;  // size_bytes(kind) per block, unaligned
  ScaleRule rule = ScaleRule::kAbsmax;
  ScaleKind kind = ScaleKind::kFp32;
  BlockShape shape = BlockShape::kFlat;
  std::size_t matrix_rows = 0, cols = 0;  // of one matrix; where blocks are square
  const TensorScales* tensors = nullptr;  // one for `blocks_per_tensor` blocks
  std::size_t blocks_per_tensor = 0;
  // Where blocks are groups of a row; `elements` are whole rows of `cols`.
  std::size_t row_bytes = 0;      // of the values; what elements leave of it becomes 0
  bool add_half = false;          // int8: 128 is added to codes
  std::uint8_t* zeros = nullptr;  // by ScaleRule::kMinMax: the zero points, a signed byte a group

  std::size_t blocks() const {
    const std::size_t matrix = matrix_rows * cols;
    const std::size_t matrices =
        shape == BlockShape::kSquare && matrix != 0 ? elements / matrix : 1;
    return shape == BlockShape::kSquare ? block_count(shape, block, matrices, matrix_rows, cols)
                                        : ceil_div(elements, block);
  }
};

inline constexpr std::size_t kAllFinite = SIZE_MAX;

// Quantises blocks [first, last). Returns the index of the first non-finite element met under
// NonFinite::kError, else kAllFinite.
using QuantizeFn = std::size_t(const QuantizeJob& job, std::size_t first, std::size_t last);

const std::vector<Variant<QuantizeFn, ByFormat>>& quantize_variants();

// The largest magnitude among `count` elements as bits; infinity or above if one is not finite.
using AbsmaxFn = std::uint32_t(DType dtype, const void* input, std::size_t count);

// The largest magnitude among `count` elements, non-finite ones left out.
float largest_magnitude(DType dtype, const void* input, std::size_t count);

// The scale of a matrix with this largest magnitude by the format's rule; {1, 1} if it has none.
TensorScales tensor_scales_for(Format format, ScaleRule rule, float absmax);

// The same of one matrix of `count` elements.
TensorScales choose_tensor_scales(Format format, ScaleRule rule, DType dtype, const void* input,
                                  std::size_t count, ParallelFor parallel_for);

// The index of the first non-finite element, if job.nonfinite forbids them and there is one; the
// outputs are then not to be used.
std::optional<std::size_t> quantize(const QuantizeJob& job, ParallelFor parallel_for);

}  // namespace monograph
