// libFuzzer: any bytes as adapter_config.json. What the parser accepts must be JSON to another
// library, with the same rank, and no field set that cannot be merged.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>

#include "monograph/adapter/config.h"
#include "monograph/base/error.h"

namespace {

using namespace monograph;

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  AdapterConfig config;
  try {
    config = parse_adapter_config(text, "fuzz");
  } catch (const Error&) {
    return 0;
  }
  for (const char* module : {"model.layers.0.self_attn.q_proj", "lm_head", ""}) {
    const std::uint64_t rank = config.rank_of(module);
    require(rank >= 1 && rank <= kMaxLoraRank);
    require(std::isfinite(config.scale_of(module)));
  }
  // The library refuses numbers beyond a double, which harmless fields may hold.
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return 0;
  require(json["peft_type"] == "LORA" && json["r"] == config.rank);
  for (const auto& [key, value] : json.items()) {
    bool known = value.is_null();
    for (const AdapterField& field : adapter_fields()) {
      if (field.name != key) continue;
      known = true;
      const bool off =
          value.is_null() || value == false || (value.is_structured() && value.empty());
      require(field.use != FieldUse::kMustBeOff || off);
    }
    require(known);
  }
  return 0;
}
