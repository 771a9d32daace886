// GPTQ's and AWQ's words turned into the rows of compressed-tensors, without loss: the same codes,
// zero points and scales (quant_methods/word_layouts.h). Of a weight X:
//   X.weight_packed      I32 [outputs, inputs * bits / 32], the first input in the lowest bits
//   X.weight_scale       [outputs, groups], of the type they have
//   X.weight_zero_point  I32 [outputs * bits / 32, groups], the first output in the lowest bits;
//                        not written where all are the middle code
//   X.weight_shape       I64 [2]
// Where a weight of the folder has its groups scattered, each has X.weight for X.weight_packed, so
// that no loader takes it for another layout, and
//   X.weight_columns     I32 [inputs]: stored column i is input weight_columns[i]
#pragma once

#include <cstdint>
#include <vector>

#include "monograph/quant_methods/conversion.h"
#include "monograph/safetensors/plan.h"
#include "monograph/safetensors/writer.h"

namespace monograph {

// The tensors of a conversion with Action::kTurn, the values first.
std::vector<safetensors::TensorSpec> turned_specs(const Conversion& conversion);

// Whether every zero point is the middle code, 8 or 128. Throws Error as turned zero points do: for
// a field of all ones, if it is not known who subtracted the one.
bool zeros_are_middle(const Weight& weight, const WordLayout& layout);

// Bytes of the packed rows [first, first + rows).
void turn_rows(const Weight& weight, const WordLayout& layout, std::uint64_t first,
               std::uint64_t rows, std::uint8_t* out);

// Everything but the values.
void write_turned_parts(const Conversion& conversion, safetensors::ShardedWriter& writer);

}  // namespace monograph
