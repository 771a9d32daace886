#include "arguments/quantize.h"

#include <string>

#include "monograph/base/error.h"

namespace monograph::ops {
namespace {

ScaleKind check_kind(const FormatInfo& info, std::int64_t bytes) {
  for (const ScaleKind kind : info.kinds)
    if (bytes == 0 || bytes == static_cast<std::int64_t>(size_bytes(kind))) return kind;
  refuse("quantize: scale_bytes is ", bytes, ", format ", info.name, " has no scales of this size");
}

void check_quantised(const char* op, const FormatInfo& info) {
  STD_TORCH_CHECK(!info.rules.empty(), op, ": format ", info.name,
                  " is read and trained on; nothing quantises to it yet");
}

MatrixShape check_shape(const FormatInfo& info, std::int64_t block, const Tensor& input) {
  STD_TORCH_CHECK(block > 0 && block_fits(info, static_cast<std::size_t>(block)),
                  "quantize: block size is ", block, ", format ", info.name,
                  " wants a power of two from ", info.smallest_block, " to ", info.largest_block);
  std::vector<std::size_t> shape;
  for (const std::int64_t size : input.sizes()) shape.push_back(static_cast<std::size_t>(size));
  try {
    return matrix_shape(info, static_cast<std::size_t>(block), shape);
  } catch (const Error& error) {
    refuse("quantize: ", error.what());
  }
}

}  // namespace

ScaleRule check_rule(const char* op, const FormatInfo& info, std::int64_t number) {
  check_quantised(op, info);
  std::string wanted;
  for (const ScaleRule rule : info.rules) {
    if (number == 0 || number == static_cast<std::int64_t>(rule)) return rule;
    wanted += std::string(wanted.empty() ? "" : ", ") + std::to_string(static_cast<int>(rule)) +
              " (" + name_of(rule) + ")";
  }
  refuse(op, ": rule is ", number, ", format ", info.name, " wants 0 (default), ", wanted);
}

QuantizeArguments check_quantize(const Tensor& input, std::int64_t format, std::int64_t block,
                                 bool double_quant, bool saturate_nonfinite, std::int64_t rule,
                                 std::int64_t scale_bytes) {
  const FormatInfo& info = check_format("quantize", "format", format);
  check_given("quantize", "input", input);
  STD_TORCH_CHECK(input.is_contiguous(), "quantize: input is not contiguous");
  STD_TORCH_CHECK(!double_quant || info.double_quant, "quantize: format ", info.name,
                  " has no double quantisation");
  check_quantised("quantize", info);
  const MatrixShape shape = check_shape(info, block, input);
  QuantizeJob job = {};
  job.format = info.kernels;
  job.dtype = dtype_of(input.scalar_type(), "quantize", "input");
  job.input = input.const_data_ptr();
  job.elements = shape.elements();
  job.block = static_cast<std::size_t>(block);
  job.nonfinite = saturate_nonfinite ? NonFinite::kSaturate : NonFinite::kError;
  job.rule = check_rule("quantize", info, rule);
  job.kind = check_kind(info, scale_bytes);
  job.shape = info.shape;
  job.matrix_rows = shape.rows;
  job.cols = shape.cols;
  return {info, shape, job};
}

}  // namespace monograph::ops
