// quantization_config of config.json, by which transformers loads what convert() wrote.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "monograph/base/dtype.h"
#include "monograph/quant_methods/conversion.h"
#include "monograph/text/json_document.h"

namespace monograph {

// That of the producer in whose form the first quantised weight is (producers/):
//   bitsandbytes        the keys and the order of BitsAndBytesConfig.to_dict() in transformers; the
//                       compute type is the given one, else that of `config`, else that of the
//                       first quantised weight
//   compressed-tensors  one group of its scheme for weights, activations left alone
//   DeepSeek            quant_method fp8 with weight_block_size
//   gpt-oss             quant_method mxfp4, as OpenAI ships it: experts alone
// Stacks of experts in names of our own are recorded as "monograph_experts": "stacked".
// Matrices that stay as they are become the list of modules to leave alone. Throws Error if
// quantised weights differ in producer, or in format other than nf4 and fp4.
json::Value quantization_config(const json::Value& config, std::span<const Conversion> conversions,
                                std::optional<DType> compute_dtype = {});

// That of compressed-tensors: one group for every linear layer but those to ignore, stored in
// `format`.
json::Value compressed_config(std::string_view format, json::Value weights, json::Value ignore);

// Modules that transformers must not make packed layers of: every matrix that stayed as it was.
// Given a list, transformers does not look for the head itself.
json::Value skipped_modules(std::span<const Conversion> conversions);

}  // namespace monograph
