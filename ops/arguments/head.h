// Arguments of the operators of a language model's head, checked. The labels are data: whether they
// are in the vocabulary is for the backend to see, where they are.
#pragma once

#include "arguments/linear.h"
#include "monograph/kernels/linear_cross_entropy/linear_cross_entropy.h"

namespace monograph::ops {

struct HeadArguments {
  RowsArgument x;
  std::optional<RowsArgument> bias;
  Tensor labels;
  CrossEntropyProblem problem;
};

HeadArguments check_head(const char* op, const Tensor& x, const Tensor& values,
                         const std::vector<Tensor>& scales, const std::vector<std::int64_t>& layout,
                         const std::optional<Tensor>& bias, const Tensor& labels, double softcap,
                         double scale);

Tensor float_vector(const Tensor& like, std::size_t count);

}  // namespace monograph::ops
