// Which factor of a LoRA on a stack of experts is that of the inputs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace monograph {

// PEFT before 0.20 took the dimensions of some parameters for each other, which trains the same
// change with A that of the outputs.
enum class FactorOrder : std::uint8_t {
  kStraight,  // A has the inputs
  kSwapped,   // A has the outputs
  kEither,    // the matrices are square: the shape does not tell
  kNeither,   // does not fit
};

// One parameter of a module: columns of A, rows of B, and the stack as [experts, outputs, inputs].
struct FactorShape {
  std::uint64_t a_cols = 0, b_rows = 0;
  const std::vector<std::uint64_t>* stack = nullptr;
};

// For each parameter of one module. They are all of one PEFT: what one of them shows holds for
// those that do not tell.
std::vector<FactorOrder> factor_orders(std::span<const FactorShape> parameters);

}  // namespace monograph
