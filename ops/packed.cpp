#include "packed.h"

#include "base/float_types.h"

namespace monograph::ops {
namespace {

const std::uint8_t* check_bytes(const char* op, const char* what, const Tensor& tensor,
                                std::size_t want) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Byte, op, ": ", what, " has dtype ",
                  name_of(tensor.scalar_type()), ", wanted uint8");
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", what, " is not contiguous");
  STD_TORCH_CHECK(static_cast<std::size_t>(tensor.numel()) == want, op, ": ", what, " has ",
                  tensor.numel(), " bytes, wanted ", want);
  return static_cast<const std::uint8_t*>(tensor.const_data_ptr());
}

ScalesView check_scales(const char* op, const FormatInfo& info, const std::vector<Tensor>& scales,
                        std::size_t blocks) {
  STD_TORCH_CHECK(scales.size() == 1 || (scales.size() == 4 && info.double_quant), op,
                  ": scales has ", scales.size(), " tensors, format ", info.name,
                  " wants 1 (plain) or 4 (double-quantised: absmax, groups, map, offset)");
  ScalesView view;
  if (scales.size() == 1) {
    view.blocks = check_bytes(op, "scales[0] (absmax)", scales[0], 4 * blocks);
    return view;
  }
  view.blocks = check_bytes(op, "scales[0] (absmax codes)", scales[0], blocks);
  view.groups = check_bytes(op, "scales[1] (groups)", scales[1], 4 * ceil_div(blocks, kScaleGroup));
  view.map = check_bytes(op, "scales[2] (map)", scales[2], 4 * 256);
  view.offset = load_f32(check_bytes(op, "scales[3] (offset)", scales[3], 4));
  return view;
}

}  // namespace

PackedArgument check_packed(const char* op, const Tensor& values, const std::vector<Tensor>& scales,
                            const std::vector<std::int64_t>& layout) {
  STD_TORCH_CHECK(layout.size() >= 3, op, ": layout has ", layout.size(),
                  " entries, wanted [format, block, *shape] with at least one dimension");
  const FormatInfo* info = find_format(static_cast<Format>(layout[0]));
  STD_TORCH_CHECK(layout[0] > 0 && layout[0] < 256 && info != nullptr, op, ": layout[0] is ",
                  layout[0], ", not the number of a packed format");
  STD_TORCH_CHECK(layout[1] > 0 && block_fits(*info, static_cast<std::size_t>(layout[1])), op,
                  ": block size is ", layout[1], ", format ", info->name,
                  " wants a power of two from ", info->smallest_block, " to ", info->largest_block);
  PackedArgument argument;
  argument.shape.assign(layout.begin() + 2, layout.end());
  std::size_t elements = 1;
  for (const std::int64_t size : argument.shape) {
    STD_TORCH_CHECK(size >= 0, op, ": layout has the negative dimension ", size);
    STD_TORCH_CHECK(!__builtin_mul_overflow(elements, static_cast<std::size_t>(size), &elements),
                    op, ": the shape in layout has too many elements");
  }
  PackedView& view = argument.view;
  view.format = info->format;
  view.block = static_cast<std::size_t>(layout[1]);
  view.cols = static_cast<std::size_t>(argument.shape.back());
  view.rows = view.cols == 0 ? 0 : elements / view.cols;
  view.values = check_bytes(op, "values", values, packed_bytes(*info, elements));
  view.scales = check_scales(op, *info, scales, ceil_div(elements, view.block));
  return argument;
}

}  // namespace monograph::ops
