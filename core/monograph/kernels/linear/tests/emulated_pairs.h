// The kernels of bf16 pairs with an emulation in place of the instruction.
#pragma once

#include "monograph/kernels/linear/kernels.h"

namespace monograph {

// For a CPU with AVX-512.
const LinearKernels& emulated_pairs(Pass pass);

}  // namespace monograph
