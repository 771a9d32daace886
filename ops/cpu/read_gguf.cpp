// monograph::read_gguf: what a GGUF file says of its model, as the bytes of a JSON document
// (core/monograph/gguf/description.h).
#include <cstring>

#include "arguments/device.h"
#include "arguments/folder_name.h"
#include "monograph/base/error.h"
#include "monograph/gguf/description.h"

namespace monograph::ops {
namespace {

Tensor read_gguf_cpu(const Tensor& file) {
  constexpr const char* kOp = "read_gguf";
  const std::string name = folder_name(kOp, file);
  std::string text;
  try {
    text = json::dump(gguf::describe(gguf::FileReader(name)));
  } catch (const Error& error) {
    refuse(kOp, ": ", error.what());
  }
  Tensor bytes = empty(kOp, file, {static_cast<std::int64_t>(text.size())}, ScalarType::Byte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(monograph, CompositeExplicitAutograd, m) {
  m.impl("read_gguf", TORCH_BOX(&read_gguf_cpu));
}

}  // namespace monograph::ops
