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

MatrixShape check_shape(const FormatInfo& info, std::int64_t block, const Tensor& input) {
  const bool groups = info.shape == BlockShape::kGroup;
  STD_TORCH_CHECK(block > 0 && block_fits(info, static_cast<std::size_t>(block)),
                  "quantize: block size is ", block, ", format ", info.name, " wants ",
                  groups ? "1 or more, at most 2^56" : "a power of two from ",
                  groups ? "" : std::to_string(info.smallest_block),
                  groups ? "" : " to " + std::to_string(info.largest_block));
  std::vector<std::size_t> shape;
  for (const std::int64_t size : input.sizes()) shape.push_back(static_cast<std::size_t>(size));
  try {
    const MatrixShape found = matrix_shape(info, static_cast<std::size_t>(block), shape);
    if (groups && found.matrices != 1)
      throw Error("input has " + std::to_string(found.matrices) + " matrices, format " + info.name +
                  " wants one");
    return found;
  } catch (const Error& error) {
    refuse("quantize: ", error.what());
  }
}

}  // namespace

ScaleRule check_rule(const char* op, const FormatInfo& info, std::int64_t number) {
  STD_TORCH_CHECK(!info.rules.empty(), op, ": format ", info.name,
                  " is read and trained on, nothing quantises to it");
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
  const ScaleRule chosen = check_rule("quantize", info, rule);
  check_given("quantize", "input", input);
  STD_TORCH_CHECK(input.is_contiguous(), "quantize: input is not contiguous");
  STD_TORCH_CHECK(!double_quant || info.double_quant, "quantize: format ", info.name,
                  " has no double quantisation");
  const MatrixShape shape = check_shape(info, block, input);
  QuantizeJob job = {};
  job.format = info.kernels;
  job.dtype = dtype_of(input.scalar_type(), "quantize", "input");
  job.input = input.const_data_ptr();
  job.elements = shape.elements();
  job.block = static_cast<std::size_t>(block);
  job.nonfinite = saturate_nonfinite ? NonFinite::kSaturate : NonFinite::kError;
  job.rule = chosen;
  job.kind = check_kind(info, scale_bytes);
  // A scale beyond 65504 would be an infinity, and its weights no numbers.
  STD_TORCH_CHECK(info.shape != BlockShape::kGroup || job.kind != ScaleKind::kFp16 ||
                      job.dtype == DType::kFloat16,
                  "quantize: format ", info.name, " has scales in float16, input is ",
                  name_of(job.dtype), "; wanted float16, or a format with scales of its type");
  job.shape = info.shape;
  job.matrix_rows = shape.rows;
  job.cols = shape.cols;
  if (info.shape == BlockShape::kGroup) {
    job.row_bytes = row_bytes(info, shape.cols);
    job.add_half = info.zero_points == ZeroPoints::kPacked && info.bits == 8;
  }
  return {info, shape, job};
}

}  // namespace monograph::ops
