// The middle of a gated MLP and its gradient:
//   y     = round(f(gate)) * up        f: silu, or gelu by tanh or by erf
//   dgate = dy * up * f'(gate)         one rounding
//   dup   = dy * round(f(gate))
// f(gate) is rounded to the type of the activations, as an activation that is a module of its own
// does. Everything else is fp32; what is fused is fused everywhere: the same bits on every
// instruction set, for any number of threads, for an element wherever it stands.
//
// Errors of f (tests/): in bf16 and fp16 the rounding alone, half a unit in the last place, for
// every argument; in fp32 2.1 units for silu and 2^-22 |x| for gelu. Where e^-x leaves fp32, below
// -88 (silu) and -10 (gelu by tanh), the result is -0, as torch's is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/cpu/variant.h"

namespace monograph {

enum class Activation : std::uint8_t { kSilu, kGeluTanh, kGelu };

// Rows of `cols` elements; strides count elements. Results overlap no input.
struct GatedForward {
  DType dtype;
  Activation activation;
  std::size_t rows, cols;
  const void *gate, *up;
  std::size_t gate_stride, up_stride;
  void* y;  // contiguous
};

struct GatedBackward {
  DType dtype;
  Activation activation;
  std::size_t rows, cols;
  const void *dy, *gate, *up;
  std::size_t dy_stride, gate_stride, up_stride;
  void *dgate, *dup;  // contiguous
};

// Elements [begin, end) of a row.
struct GatedKernels {
  void (*forward)(const GatedForward& job, std::size_t row, std::size_t begin, std::size_t end);
  void (*backward)(const GatedBackward& job, std::size_t row, std::size_t begin, std::size_t end);
};

struct ByActivation {
  DType dtype;
  Activation activation;
  bool operator==(const ByActivation&) const = default;
};

// Every variant, best instruction set first.
const std::vector<Variant<const GatedKernels, ByActivation>>& gated_activation_variants();

void gated_activation(const GatedForward& job, ParallelFor parallel_for);
void gated_activation_backward(const GatedBackward& job, ParallelFor parallel_for);

}  // namespace monograph
