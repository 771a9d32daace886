// libFuzzer: any bytes as a sharded index. What the parser accepts must be JSON to another library
// with the same weight_map, and no shard may leave the folder.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

#include "monograph/base/error.h"
#include "monograph/safetensors/index.h"

namespace {

using namespace monograph::safetensors;

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  Index index;
  try {
    index = parse_index(text, "fuzz");
  } catch (const monograph::Error&) {
    return 0;
  }
  for (const std::string& shard : index.shards) {
    const std::filesystem::path path = std::filesystem::path("/folder") / shard;
    require(path.lexically_normal() == path);
    require(path.string().starts_with("/folder/"));
    require(path.extension() == ".safetensors");
  }
  // The library refuses numbers beyond a double, which are skipped here.
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return 0;
  require(json["weight_map"].size() == index.tensors.size());
  for (const IndexEntry& entry : index.tensors) {
    require(json["weight_map"][entry.tensor] == index.shards[entry.shard]);
  }
  return 0;
}
