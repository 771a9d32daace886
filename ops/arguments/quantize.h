// The arguments of quantize, checked.
#pragma once

#include "arguments/packed.h"
#include "monograph/formats/bind.h"
#include "monograph/kernels/quantize/quantize.h"

namespace monograph::ops {

struct QuantizeArguments {
  const FormatInfo& info;
  MatrixShape shape;
  QuantizeJob job;  // without outputs and tensor scales
};

// `rule` and `scale_bytes` are 0 for the format's first.
QuantizeArguments check_quantize(const Tensor& input, std::int64_t format, std::int64_t block,
                                 bool double_quant, bool saturate_nonfinite, std::int64_t rule,
                                 std::int64_t scale_bytes);

// The number of a scale rule in a call; 0 is the format's first.
ScaleRule check_rule(const char* op, const FormatInfo& info, std::int64_t number);

}  // namespace monograph::ops
