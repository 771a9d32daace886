#include "arguments/packed.h"

#include "monograph/base/error.h"
#include "monograph/formats/bind.h"

namespace monograph::ops {
namespace {

ByteSpan bytes_of(const char* op, const std::string& what, const Tensor& tensor) {
  check_given(op, what.c_str(), tensor);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Byte, op, ": ", what, " has dtype ",
                  name_of(tensor.scalar_type()), ", wanted uint8");
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", what, " is not contiguous");
  return {static_cast<const std::uint8_t*>(tensor.const_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

}  // namespace

const FormatInfo& check_format(const char* op, const char* what, std::int64_t number) {
  const FormatInfo* info = find_format(static_cast<Format>(number));
  STD_TORCH_CHECK(number > 0 && number < 256 && info != nullptr, op, ": ", what, " is ", number,
                  ", not the number of a packed format");
  return *info;
}

PackedArgument check_packed(const char* op, const Tensor& values, const std::vector<Tensor>& scales,
                            const std::vector<std::int64_t>& layout) {
  STD_TORCH_CHECK(layout.size() >= 3, op, ": layout has ", layout.size(),
                  " entries, wanted [format, block, *shape] with at least one dimension");
  const FormatInfo& info = check_format(op, "layout[0]", layout[0]);
  STD_TORCH_CHECK(layout[1] > 0 && block_fits(info, static_cast<std::size_t>(layout[1])), op,
                  ": block size is ", layout[1], ", format ", info.name,
                  " wants a power of two from ", info.smallest_block, " to ", info.largest_block);
  PackedArgument argument;
  argument.shape.assign(layout.begin() + 2, layout.end());
  std::vector<std::size_t> shape;
  for (const std::int64_t size : argument.shape) {
    STD_TORCH_CHECK(size >= 0, op, ": layout has the negative dimension ", size);
    shape.push_back(static_cast<std::size_t>(size));
  }
  std::vector<ByteSpan> scale_bytes;
  for (std::size_t i = 0; i < scales.size(); ++i)
    scale_bytes.push_back(bytes_of(op, "scales[" + std::to_string(i) + "]", scales[i]));
  const std::size_t block = static_cast<std::size_t>(layout[1]);
  try {
    argument.view = bind_packed(info, block, shape, bytes_of(op, "values", values), scale_bytes);
  } catch (const Error& error) {
    refuse(op, ": ", error.what());
  }
  return argument;
}

}  // namespace monograph::ops
