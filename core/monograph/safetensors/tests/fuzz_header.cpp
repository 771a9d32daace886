// libFuzzer: any bytes as a file. What the parser accepts must be JSON to another library, cover
// the data exactly, and survive being planned and parsed again.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>

#include "monograph/base/error.h"
#include "monograph/safetensors/header.h"
#include "monograph/safetensors/plan.h"

namespace {

using namespace monograph::safetensors;

void require(bool condition) {
  if (!condition) std::abort();
}

void check(const Header& header, std::uint64_t file_size) {
  std::uint64_t end = header.data_offset_bytes;
  std::vector<TensorSpec> specs;
  for (const TensorEntry& entry : header.tensors) {
    require(entry.offset_bytes == end);
    require(entry.size_bytes <= file_size - entry.offset_bytes);
    require(header.find(entry.name) == &entry);
    specs.push_back({entry.name, entry.dtype, entry.shape});
    require(size_bytes(specs.back()) == entry.size_bytes);
    end += entry.size_bytes;
  }
  require(end == file_size);
  const FilePlan plan = plan_file(specs, header.metadata);
  require(plan.header.tensors.size() == header.tensors.size());
  require(plan.header.metadata == header.metadata);
  for (const TensorEntry& entry : header.tensors) {
    const TensorEntry* again = plan.header.find(entry.name);
    require(again != nullptr && again->dtype == entry.dtype && again->shape == entry.shape);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Header header;
  try {
    header = parse_header({data, size}, size, "fuzz");
  } catch (const monograph::Error&) {
    return 0;
  }
  const std::string_view json(reinterpret_cast<const char*>(data) + kLengthBytes,
                              header.data_offset_bytes - kLengthBytes);
  require(nlohmann::json::accept(json));
  check(header, size);
  return 0;
}
