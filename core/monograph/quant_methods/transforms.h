// What a producer does to activations besides packing weights.
#pragma once

#include <string_view>

#include "monograph/text/json_document.h"

namespace monograph {

// Throws Error, `source` in front, if quantization_config of a config.json says that more than the
// weights' codes is another: rotations and sparsity of compressed-tensors, which whoever reads
// values alone would drop. `config` may be null.
void refuse_transforms(const json::Value* config, std::string_view source);

}  // namespace monograph
