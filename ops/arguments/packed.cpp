#include "arguments/packed.h"

#include <algorithm>

#include "monograph/base/error.h"
#include "monograph/formats/bind.h"
#include "monograph/read_ahead/registry.h"

namespace monograph::ops {
namespace {

ByteSpan bytes_of(const char* op, const std::string& what, const Tensor& tensor, Memory memory) {
  check_given(op, what.c_str(), tensor);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Byte, op, ": ", what, " has dtype ",
                  name_of(tensor.scalar_type()), ", wanted uint8");
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", what, " is not contiguous");
  return {static_cast<const std::uint8_t*>(tensor.const_data_ptr()),
          static_cast<std::size_t>(tensor.numel()), memory};
}

}  // namespace

const FormatInfo& check_format(const char* op, const char* what, std::int64_t number) {
  const FormatInfo* info = find_format(static_cast<Format>(number));
  STD_TORCH_CHECK(number > 0 && number < 256 && info != nullptr, op, ": ", what, " is ", number,
                  ", not the number of a packed format");
  return *info;
}

Layout take_layout(const char* op, std::span<const std::int64_t>& numbers) {
  Layout layout;
  const bool versioned = !numbers.empty() && numbers[0] < 0;
  if (!versioned) {
    STD_TORCH_CHECK(numbers.size() >= 4, op, ": a layout has ", numbers.size(),
                    " entries, wanted [format, block, rows, cols]");
    layout.format = numbers[0];
    layout.block = numbers[1];
    layout.shape = {numbers[2], numbers[3]};
    numbers = numbers.subspan(4);
    return layout;
  }
  STD_TORCH_CHECK(numbers[0] == -1, op, ": layout has version ", numbers[0],
                  ", wanted -1 or the number of a format");
  constexpr std::size_t kBefore = 4, kBehind = 2;
  const std::size_t left =
      numbers.size() < kBefore + kBehind ? 0 : numbers.size() - kBefore - kBehind;
  STD_TORCH_CHECK(
      left >= 1 && numbers[3] >= 1 && static_cast<std::size_t>(numbers[3]) <= left, op,
      ": layout has ", numbers.size(),
      " entries, wanted [-1, format, block, dimensions, *shape, origin, grid_rows] with "
      "at least one dimension");
  const auto dimensions = static_cast<std::size_t>(numbers[3]);
  const auto shape = numbers.subspan(kBefore, dimensions);
  const std::int64_t origin = numbers[kBefore + dimensions];
  const std::int64_t grid_rows = numbers[kBefore + dimensions + 1];
  STD_TORCH_CHECK(origin >= 0, op, ": layout has the origin ", origin, ", wanted 0 or more");
  STD_TORCH_CHECK(grid_rows >= 0, op, ": layout has grids of ", grid_rows,
                  " rows, wanted 0 for one grid or more");
  STD_TORCH_CHECK(origin == 0 || grid_rows == 0, op, ": layout has the origin ", origin,
                  " and grids of ", grid_rows, " rows, wanted one of them");
  layout.versioned = true;
  layout.format = numbers[1];
  layout.block = numbers[2];
  layout.shape.assign(shape.begin(), shape.end());
  layout.origin = static_cast<std::size_t>(origin);
  layout.grid_rows = static_cast<std::size_t>(grid_rows);
  numbers = numbers.subspan(kBefore + dimensions + kBehind);
  return layout;
}

Layout read_layout(const char* op, const std::vector<std::int64_t>& numbers) {
  if (!numbers.empty() && numbers[0] < 0) {
    std::span<const std::int64_t> rest = numbers;
    Layout layout = take_layout(op, rest);
    STD_TORCH_CHECK(rest.empty(), op, ": layout has ", numbers.size(), " entries, wanted ",
                    numbers.size() - rest.size());
    return layout;
  }
  STD_TORCH_CHECK(numbers.size() >= 3, op, ": layout has ", numbers.size(),
                  " entries, wanted [format, block, *shape] with at least one dimension");
  return {numbers[0], numbers[1], {numbers.begin() + 2, numbers.end()}};
}

void note_weight(const Tensor& values, const std::vector<Tensor>& scales) {
  if (!reads_ahead()) return;
  if (values.defined()) note_use(values.const_data_ptr());
  for (const Tensor& scale : scales)
    if (scale.defined()) note_use(scale.const_data_ptr());
}

PackedArgument check_packed(const char* op, const Tensor& values, const std::vector<Tensor>& scales,
                            const Layout& layout) {
  const FormatInfo& info =
      check_format(op, layout.versioned ? "layout[1]" : "layout[0]", layout.format);
  STD_TORCH_CHECK(layout.block > 0 || info.shape != BlockShape::kGroup, op, ": block size is ",
                  layout.block, ", format ", info.name, " wants 1 or more, at most 2^56");
  STD_TORCH_CHECK(
      info.shape == BlockShape::kGroup ||
          (layout.block > 0 && block_fits(info, static_cast<std::size_t>(layout.block))),
      op, ": block size is ", layout.block, ", format ", info.name, " wants a power of two from ",
      info.smallest_block, " to ", info.largest_block);
  PackedArgument argument;
  argument.shape = layout.shape;
  std::vector<std::size_t> shape;
  shape.reserve(layout.shape.size());
  for (const std::int64_t size : layout.shape) {
    STD_TORCH_CHECK(size >= 0, op, ": layout has the negative dimension ", size);
    shape.push_back(static_cast<std::size_t>(size));
  }
  check_given(op, "values", values);
  const Memory memory = values.is_cpu() ? Memory::kHost : Memory::kDevice;
  std::vector<ByteSpan> scale_bytes;
  scale_bytes.reserve(scales.size());
  for (std::size_t i = 0; i < scales.size(); ++i)
    scale_bytes.push_back(bytes_of(op, "scales[" + std::to_string(i) + "]", scales[i], memory));
  const std::size_t block = static_cast<std::size_t>(layout.block);
  const ByteSpan bytes = bytes_of(op, "values", values, memory);
  try {
    if (layout.grid_rows != 0)
      argument.weight = bind_grids(info, block, shape, layout.grid_rows, bytes, scale_bytes);
    else
      argument.weight.first = bind_packed(info, block, shape, bytes, scale_bytes, layout.origin);
  } catch (const Error& error) {
    refuse(op, ": ", error.what());
  }
  return argument;
}

DType check_output(const char* op, const Tensor& out, const PackedArgument& weight,
                   const Tensor& values, const std::vector<Tensor>& scales) {
  check_given(op, "out", out);
  const DType type = dtype_of(out.scalar_type(), op, "out");
  STD_TORCH_CHECK(out.is_contiguous(), op, ": out is not contiguous");
  STD_TORCH_CHECK(out.sizes().size() == weight.shape.size() &&
                      std::equal(weight.shape.begin(), weight.shape.end(), out.sizes().begin()),
                  op, ": the shape of out is not that of the weight");
  STD_TORCH_CHECK(!overlap(out, values), op, ": out shares memory with values");
  for (const Tensor& scale : scales)
    STD_TORCH_CHECK(!overlap(out, scale), op, ": out shares memory with the scales");
  return type;
}

}  // namespace monograph::ops
