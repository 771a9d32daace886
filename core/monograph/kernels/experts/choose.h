// Which experts a token goes to and with which weights, of the logits z of its router, and the
// gradient:
//   p     = softmax(z)
//   ids   = the experts of the k largest logits, the largest first, of equals the lowest number;
//           NaN counts as the largest
//   w[i]  = p[ids[i]], or normalised p[ids[i]] / (sum over the k of p)
//   dz[j] = p[j] (d[j] - sum over the k of d w)       d[j] = dw[i] where ids[i] = j, else 0
//           normalised: w for p, and 0 for an expert that is not chosen
//
// All in fp64 in the order of experts or of slots, each result rounded to fp32 and then to the type
// of the logits. No vector code: the same bits for any number of threads, for a token among any
// others and, up to the last bit of a fp64 exponential, on every machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/base/dtype.h"
#include "monograph/cpu/parallel.h"
#include "monograph/kernels/linear/operands.h"

namespace monograph {

struct ChooseExperts {
  DType dtype;
  Matrix logits;      // [tokens, experts]
  std::size_t slots;  // k: 1 to experts
  bool normalise;
};

// ids and weights [tokens, slots], contiguous.
void choose_experts(const ChooseExperts& problem, std::int64_t* ids, void* weights,
                    ParallelFor parallel_for);

// dlogits [tokens, experts], contiguous. An id outside [0, experts) takes no gradient.
void choose_experts_backward(const ChooseExperts& problem, const std::int64_t* ids,
                             const void* dweights, void* dlogits, ParallelFor parallel_for);

}  // namespace monograph
