// What is written of weights quantised in groups of a row, as compressed-tensors names it. Of a
// matrix X.weight [rows, cols]:
//   int4, int8  X.weight_packed I32 [rows, words], X.weight_scale [rows, groups], X.weight_shape
//               I64 [2]; by ScaleRule::kMinMax X.weight_zero_point I32 [words of rows, groups]
//   fp8         X.weight F8_E4M3 [rows, cols], X.weight_scale [rows, 1]
// Scales have the type that the format says.
#pragma once

#include <vector>

#include "monograph/quant_methods/conversion.h"
#include "monograph/quant_methods/packed_parts.h"
#include "monograph/text/json_document.h"

namespace monograph {

// Throws Error naming the weight unless it is a matrix X.weight.
std::vector<safetensors::TensorSpec> group_specs(const Conversion& conversion);
void write_group_parts(const Conversion& conversion, const PackedScales& scales,
                       safetensors::ShardedWriter& writer);

// The arguments of a scheme's weights; `group` is 0 for rows.
json::Value integer_scheme(std::uint64_t bits, std::uint64_t group, bool symmetric);
// "pack-quantized" or "float-quantized", and the arguments.
std::string_view group_storage(const Conversion& conversion);
json::Value group_scheme(const Conversion& conversion);

}  // namespace monograph
