// Labels of a head on the CPU.
#pragma once

#include "arguments/head.h"

namespace monograph::ops {

// check_head, and every label is in the vocabulary, or kIgnoredLabel.
HeadArguments check_head_and_labels(const char* op, const Tensor& x, const Tensor& values,
                                    const std::vector<Tensor>& scales,
                                    const std::vector<std::int64_t>& layout,
                                    const std::optional<Tensor>& bias, const Tensor& labels,
                                    double softcap, double scale);

}  // namespace monograph::ops
