// libFuzzer: any bytes as the config.json of a model. What is accepted is in range, and each layer
// has a window and a table of angles.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "monograph/base/error.h"
#include "monograph/train/model_config.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace monograph;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const train::ModelConfig model = train::read_model_config(json::parse(text, "fuzz"), "fuzz");
    require(model.layers >= 1 && model.layers == model.windows.size());
    require(model.heads >= 1 && model.kv_heads >= 1 && model.heads % model.kv_heads == 0);
    require(model.head_size >= 2 && model.head_size <= 512);
    require(model.width >= 1 && model.vocabulary >= 1);
    require(std::isfinite(model.eps) && std::isfinite(model.embedding_scale));
    require(model.rope_of.size() == model.layers && !model.ropes.empty());
    for (const std::size_t table : model.rope_of) require(table < model.ropes.size());
    for (const std::int64_t window : model.windows) require(window >= 0);
    if (model.experts.count == 0) return 0;
    require(model.experts.slots >= 1 && model.experts.slots <= model.experts.count);
    require(model.experts.layers.size() == model.layers && model.experts.inner >= 1);
  } catch (const Error&) {
  }
  return 0;
}
