// The arguments of experts and its gradients, checked and turned into views.
#pragma once

#include <optional>
#include <vector>

#include "arguments/linear.h"
#include "arguments/packed.h"
#include "monograph/kernels/experts/experts.h"
#include "stable.h"

namespace monograph::ops {

// What one projection takes, as the schema has it.
struct ExpertsWeight {
  const Tensor& values;
  const std::vector<Tensor>& scales;
  const std::vector<std::int64_t>& layout;
  const std::optional<Tensor>&bias, &a, &b;
  double scale;
};

struct ExpertsNumbers {
  std::int64_t activation;
  bool interleaved;
  double alpha, limit;
  bool transposed;
};

// Views into the tensors of the call, which must outlive them, and into copies that `owners` keeps.
struct ExpertsArguments {
  ExpertsProblem problem;
  std::vector<Tensor> owners;
};

// ids and weights [T, k] with x [T, H]; weights in the type of x or fp32. Layouts [E, 2I, H], [E,
// I, H] without a gate, and [E, H, I]; or two of [E, I, H] for gate and up, packed, whose layout is
// [-2, scales of gate, length of its layout, *layout of gate, *layout of up] and whose scales are
// those of gate, the values of up and its scales. With `transposed`, which wants plain weights, [E,
// H, 2I] and [E, I, H]. Throws with the name of `op`, the thing, the value found and the value
// wanted. Reads no ids: any number is allowed.
ExpertsArguments check_experts(const char* op, const Tensor& x, const Tensor& ids,
                               const Tensor& weights, const ExpertsWeight& first,
                               const ExpertsWeight& second, const ExpertsNumbers& numbers);

// A list of slots: ids, rows and weights [S], rows of x. Without weights, which forward needs not,
// nullptr. Reads neither ids nor rows: whoever runs a kernel checks that each row is one of x.
ExpertsArguments check_experts_slots(const char* op, const Tensor& x, const Tensor& rows,
                                     const Tensor& ids, const Tensor* weights,
                                     const ExpertsWeight& first, const ExpertsWeight& second,
                                     const ExpertsNumbers& numbers);

// dy like x.
RowsArgument check_experts_dy(const char* op, const Tensor& dy, const ExpertsArguments& arguments);

// dy like x. `pre` [T k, 2I], or no rows: nullptr.
struct ExpertsGradientArguments {
  RowsArgument dy, pre;
  const void* pre_data() const { return pre.matrix.rows == 0 ? nullptr : pre.matrix.data; }
};
ExpertsGradientArguments check_experts_gradient(const char* op, const Tensor& dy, const Tensor& pre,
                                                const ExpertsArguments& arguments);

}  // namespace monograph::ops
