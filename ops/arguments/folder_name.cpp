#include "arguments/folder_name.h"

#include <string_view>

#include "arguments/device.h"
#include "monograph/text/utf8.h"

namespace monograph::ops {
namespace {

// Error messages are text, and would not arrive with a name in them that is none.
bool is_text(std::string_view name) {
  while (!name.empty()) {
    const bool ascii = text::byte_at(name, 0) < 0x80;
    const std::size_t length = ascii ? 1 : text::utf8_sequence_length(name);
    if (length == 0) return false;
    name.remove_prefix(length);
  }
  return true;
}

}  // namespace

std::string folder_name(const char* op, const Tensor& folder) {
  check_device(op, DeviceType::CPU, {{"folder", folder}});
  check_given(op, "folder", folder);
  STD_TORCH_CHECK(folder.scalar_type() == ScalarType::Byte && folder.dim() == 1 &&
                      folder.numel() > 0 && folder.is_contiguous(),
                  op, ": folder is not a name, wanted its bytes");
  std::string name(static_cast<const char*>(folder.const_data_ptr()),
                   static_cast<std::size_t>(folder.numel()));
  STD_TORCH_CHECK(name.find('\0') == std::string::npos, op, ": folder has a byte 0 in its name");
  STD_TORCH_CHECK(is_text(name), op, ": folder is ", text::in_quotes(name), ", wanted UTF-8");
  return name;
}

}  // namespace monograph::ops
