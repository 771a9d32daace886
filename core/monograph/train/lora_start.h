// Where an adapter begins: A drawn uniformly within 1 / sqrt(inputs) and rounded to the type of the
// model, B zero, as PEFT draws them after torch.manual_seed(seed), number by number.
#pragma once

#include <cstdint>

#include "monograph/train/lora_parameters.h"
#include "monograph/train/target_modules.h"

namespace monograph::train {

struct LoraSettings {
  std::size_t rank = 16;
  double alpha = 32;
  bool rslora = false;    // scale alpha / sqrt(rank)
  TargetModules targets;  // empty: all projections
};

// Throws Error if no projection has one of the names, or the pattern takes none, or more than them.
LoraParameters start_parameters(const LoraSettings& settings, const BaseModel& base,
                                std::uint64_t seed);

}  // namespace monograph::train
