// libFuzzer: any bytes as a quant_state. What is accepted must be the same JSON to another library,
// and must be accepted again as we write it.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string_view>

#include "monograph/base/error.h"
#include "monograph/quant_methods/quant_state.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace monograph;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const Format format : {Format::kNf4, Format::kFp4}) {
    QuantState state;
    try {
      state = parse_quant_state(text, format, "fuzz");
    } catch (const Error&) {
      continue;
    }
    const FormatInfo& info = *find_format(format);
    require(block_fits(info, state.block));
    // Sizes that callers compute from it do not overflow.
    require(state.elements <= UINT64_MAX / 8);
    const QuantState again = parse_quant_state(quant_state_text(state), format, "again");
    require(again.shape == state.shape && again.offset == state.offset);
    const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (json.is_discarded()) continue;  // numbers beyond a double
    require(json["quant_type"] == info.name);
    require(json["blocksize"] == state.block);
    require(json["shape"].size() == state.shape.size());
    for (std::size_t i = 0; i < state.shape.size(); ++i) {
      require(json["shape"][i] == state.shape[i]);
    }
    require(json.contains("nested_offset") == state.nested);
  }
  return 0;
}
