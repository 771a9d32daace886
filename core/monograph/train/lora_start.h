// Where an adapter begins: A drawn uniformly within 1 / sqrt(inputs) and rounded to the type of the
// model, B zero, as PEFT draws them after torch.manual_seed(seed), number by number.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "monograph/train/lora_parameters.h"

namespace monograph::train {

struct LoraSettings {
  std::size_t rank = 16;
  double alpha = 32;
  bool rslora = false;               // scale alpha / sqrt(rank)
  std::vector<std::string> targets;  // last parts of module names; empty: all projections
};

// Throws Error if no projection has one of the names, or one of them is that of none.
LoraParameters start_parameters(const LoraSettings& settings, const BaseModel& base,
                                std::uint64_t seed);

}  // namespace monograph::train
