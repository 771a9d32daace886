// Which weights a quantiser leaves alone, by name and shape: a file does not say what is a linear
// layer.
#pragma once

#include <string>
#include <string_view>

#include "monograph/text/json_document.h"
#include "monograph/weights/weight.h"

namespace monograph {

// Why a weight is not quantised by default; empty for the weight of a linear layer. The choice is
// that of transformers with bitsandbytes: every linear layer but the output head.
//   "not a matrix"  other than two dimensions, or a name that does not end with .weight
//   "not a float"   integers and the like
//   "embedding"     embed_tokens, wte, anything with "embed" in its last part ...
//   "output head"   lm_head, score, classifier ...
//   "router"        of a mixture of experts: a parameter of its own in transformers
//   "expert"        transformers 5 holds experts as one 3-D parameter, and bitsandbytes does not
//                   load that packed: weights/experts.h stacks them
std::string_view skip_reason(const Weight& weight);

// Throws Error for a model whose linear layers are stored transposed (Conv1D: gpt2 and similar),
// which bitsandbytes transposes before it quantises.
void check_orientation(const json::Value& config);

// "model.layers.0.mlp.gate" for "model.layers.0.mlp.gate.weight".
std::string_view module_of(std::string_view weight_name);

}  // namespace monograph
