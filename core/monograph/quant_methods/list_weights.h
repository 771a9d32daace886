// From the tensors of a checkpoint to its weights. Everything is checked here, once.
#pragma once

#include <vector>

#include "monograph/safetensors/checkpoint.h"
#include "monograph/text/json_document.h"
#include "monograph/weights/weight.h"

namespace monograph {

// Every tensor of the checkpoint is a part of exactly one weight; sorted by name. `config` is the
// folder's config.json, if there is one. Throws Error if the parts of a packed weight contradict
// each other or one is missing. The checkpoint must outlive the weights.
std::vector<Weight> list_weights(const safetensors::Checkpoint& checkpoint,
                                 const json::Value* config = nullptr);

}  // namespace monograph
