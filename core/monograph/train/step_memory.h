// The bytes that a step takes, counted before it runs by what its buffers hold. Not counted:
// scratch inside kernels, tokens, and the program itself.
#pragma once

#include <cstdint>

#include "monograph/train/base_model.h"
#include "monograph/train/lora_parameters.h"

namespace monograph::train {

// The largest micro-batch, and how many make a step.
struct StepShape {
  std::size_t tokens = 0, length = 0;  // of all rows, of one
  std::size_t micro_batches = 1, leaves = 1;
  bool recompute = true, drops = false;
};

struct StepMemory {
  std::uint64_t base = 0;         // mapped from its files, but for what has another type there
  std::uint64_t adapter = 0;      // fp32, and rounded for a step
  std::uint64_t moments = 0;      // two
  std::uint64_t gradients = 0;    // those that the tree of sums holds at once
  std::uint64_t activations = 0;  // the peak of the backward
  std::uint64_t total() const { return base + adapter + moments + gradients + activations; }
};

StepMemory step_memory(const BaseModel& base, const LoraParameters& parameters,
                       const StepShape& shape);

}  // namespace monograph::train
