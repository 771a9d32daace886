// quantization_config of a folder whose words were turned: compressed-tensors, pack-quantized.
#pragma once

#include <span>

#include "monograph/quant_methods/conversion.h"
#include "monograph/text/json_document.h"

namespace monograph {

// One group for all turned weights; every other matrix is left alone. With columns in another order
// quant_method is "monograph": compressed-tensors would read the folder wrongly. Throws Error,
// naming two of them, if turned weights differ in bits or in the size of groups, and if none is
// turned.
json::Value turned_config(std::span<const Conversion> conversions);

}  // namespace monograph
