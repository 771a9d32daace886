// monograph::split_quantize: one input cut into matrices, quantised into one buffer for each usage.
#include "monograph/kernels/quantize/split_quantize.h"

#include <string>

#include "arguments/device.h"
#include "arguments/quantize.h"
#include "monograph/base/error.h"

namespace monograph::ops {
namespace {

constexpr const char* kOp = "split_quantize";

// The row counts of the matrices, which are all rows of the input.
std::vector<std::size_t> check_splits(const Tensor& input,
                                      const std::vector<std::int64_t>& splits) {
  const std::int64_t rows = input.size(0);
  std::vector<std::size_t> found;
  std::int64_t left = rows;
  for (const std::int64_t split : splits) {
    STD_TORCH_CHECK(split >= 0 && split <= left, kOp, ": splits has ", split, " with ", left,
                    " of ", rows, " rows left");
    left -= split;
    found.push_back(static_cast<std::size_t>(split));
  }
  STD_TORCH_CHECK(left == 0, kOp, ": splits have ", rows - left, " rows, the input has ", rows);
  return found;
}

std::vector<Tensor> split_quantize_cpu(const Tensor& input, const std::vector<std::int64_t>& splits,
                                       std::int64_t format, std::int64_t block, bool rowwise,
                                       bool columnwise, bool saturate_nonfinite,
                                       std::int64_t rule) {
  check_device(kOp, DeviceType::CPU, {{"input", input}});
  const FormatInfo& info = check_format(kOp, "format", format);
  check_given(kOp, "input", input);
  STD_TORCH_CHECK(input.dim() == 2, kOp, ": input has ", input.dim(), " dimensions, wanted 2");
  STD_TORCH_CHECK(input.is_contiguous(), kOp, ": input is not contiguous");
  STD_TORCH_CHECK(block > 0 && block_fits(info, static_cast<std::size_t>(block)), kOp,
                  ": block size is ", block, ", format ", info.name, " wants a power of two from ",
                  info.smallest_block, " to ", info.largest_block);
  STD_TORCH_CHECK(info.shape != BlockShape::kGroup, kOp, ": format ", info.name,
                  " has groups of a row, wanted another");
  const DType dtype = dtype_of(input.scalar_type(), kOp, "input");
  const ScaleRule how = check_rule(kOp, info, rule);
  const std::vector<std::size_t> rows = check_splits(input, splits);
  const auto cols = static_cast<std::size_t>(input.size(1));
  std::vector<Tensor> buffers;
  std::uint8_t* outputs[2] = {};
  try {
    for (const bool transposed : {false, true}) {
      if (!(transposed ? columnwise : rowwise)) continue;
      const SplitPlaces places =
          place_splits(info, static_cast<std::size_t>(block), rows, cols, transposed);
      buffers.push_back(
          empty(kOp, input, {static_cast<std::int64_t>(places.size_bytes)}, ScalarType::Byte));
      outputs[transposed ? 1 : 0] = static_cast<std::uint8_t*>(buffers.back().mutable_data_ptr());
    }
  } catch (const Error& error) {
    refuse(kOp, ": ", error.what());
  }
  // An empty tensor has no address, and nothing to write.
  const auto bad = split_quantize(
      {info, dtype, input.const_data_ptr(), rows, cols, static_cast<std::size_t>(block), how,
       saturate_nonfinite ? NonFinite::kSaturate : NonFinite::kError, outputs[0], outputs[1]},
      torch_parallel_for);
  STD_TORCH_CHECK(!bad, kOp, ": input is not finite at flat index ", bad.value_or(0),
                  "; nonfinite=\"saturate\" lets such values through");
  return buffers;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CPU, m) {
  m.impl("split_quantize", TORCH_BOX(&split_quantize_cpu));
}

}  // namespace monograph::ops
