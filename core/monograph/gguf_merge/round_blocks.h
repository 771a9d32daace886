// A row of merged values as ggml's blocks.
//
// A base in blocks lies on the steps of its own scales, and encoding merged values anew would give
// other steps: an error in every element that has nothing to do with the adapter. So a block keeps
// its scales, unless a merged value lies more than half a step beyond its codes, or all of them
// fell below half of its largest magnitude: then it has those that the encoder of the type chooses.
// Types that are only read keep theirs always.
#pragma once

#include <cstdint>
#include <span>

#include "monograph/gguf/tensor_type.h"
#include "monograph/kernels/feedback_rounding/feedback_rounding.h"

namespace monograph::gguf {

// `base` are the blocks of the row, `values` theirs, `merged` finite; `out` has room for as many
// blocks. With directions in `feedback` rows are rounded as feedback_rounding.h says, else each
// value to the nearest. Sums run in the order of directions: the same bits everywhere.
void round_blocks(TensorType type, std::span<const std::uint8_t> base,
                  std::span<const float> values, std::span<const double> merged,
                  const FeedbackRows& feedback, std::uint8_t* out);

// Other codes in the blocks of `rows` rows, whose scales stay: of `wanted`, rows x cols finite
// values, rounded as round_blocks does. A row has the same codes whatever rows are taken together.
void set_rounded_codes(TensorType type, std::span<const double> wanted, std::size_t rows,
                       const FeedbackRows& feedback, std::uint8_t* blocks);

}  // namespace monograph::gguf
