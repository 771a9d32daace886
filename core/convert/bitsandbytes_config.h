// quantization_config of config.json, by which transformers loads 4-bit weights of bitsandbytes.
#pragma once

#include <optional>
#include <span>

#include "base/dtype.h"
#include "convert/convert.h"
#include "json/document.h"

namespace monograph {

// The keys and the order of BitsAndBytesConfig.to_dict() in transformers. Format and double_quant
// are those of the first quantised weight; matrices that stay as they are become
// llm_int8_skip_modules. The compute type is the given one, else that of `config`, else that of the
// first quantised weight.
json::Value bitsandbytes_config(const json::Value& config, std::span<const Conversion> conversions,
                                std::optional<DType> compute_dtype = {});

}  // namespace monograph
