// libFuzzer: any bytes as a recipe. What is accepted is in range.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "monograph/base/error.h"
#include "monograph/train/recipe.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace monograph;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const train::Recipe recipe = train::read_recipe(text, "fuzz");
    require(!recipe.base_model.empty() && recipe.lora.rank >= 1 && recipe.micro_batch_size >= 1);
    require(recipe.sequence_len >= 1 && recipe.dropout >= 0 && recipe.dropout < 1);
    require(recipe.schedule.learning_rate > 0 && recipe.leaves() >= 1);
  } catch (const Error&) {
  }
  return 0;
}
