// The tensors of a quantised weight beside its values, in the spelling of bitsandbytes.
#pragma once

#include <span>
#include <vector>

#include "convert/convert.h"

namespace monograph {

// The type a weight is quantised from: its own, or fp32 for a wider one.
DType source_dtype(const Weight& weight);

// All tensors of the weight, the values first.
std::vector<safetensors::TensorSpec> packed_specs(const Conversion& conversion);

// Everything but the values: absmax, tables and quant_state, from the scales of all blocks.
void write_packed_parts(const Conversion& conversion, std::span<const float> scales,
                        safetensors::ShardedWriter& writer);

}  // namespace monograph
