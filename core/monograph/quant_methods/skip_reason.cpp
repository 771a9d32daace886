#include "monograph/quant_methods/skip_reason.h"

#include <algorithm>
#include <array>

#include "monograph/base/error.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/model_settings.h"

namespace monograph {
namespace {

constexpr std::string_view kWeight = ".weight";

constexpr std::array<std::string_view, 4> kEmbeddings = {"wte", "wpe", "shared",
                                                         "relative_attention_bias"};
constexpr std::array<std::string_view, 8> kHeads = {"lm_head",    "embed_out",  "output", "score",
                                                    "classifier", "qa_outputs", "cls",    "v_head"};
// Any part of a name: Granite has router.layer, Hunyuan gate.wg.
constexpr std::array<std::string_view, 3> kRouters = {"gate", "router", "shared_expert_gate"};
constexpr std::array<std::string_view, 4> kTransposed = {"gpt2", "openai-gpt", "imagegpt",
                                                         "decision_transformer"};

template <std::size_t N>
bool contains(const std::array<std::string_view, N>& list, std::string_view word) {
  return std::find(list.begin(), list.end(), word) != list.end();
}

template <std::size_t N>
bool has_part(std::string_view name, const std::array<std::string_view, N>& list) {
  for (std::size_t begin = 0, end = 0; begin <= name.size(); begin = end + 1) {
    end = std::min(name.find('.', begin), name.size());
    if (contains(list, name.substr(begin, end - begin))) return true;
  }
  return false;
}

}  // namespace

std::string_view module_of(std::string_view weight_name) {
  return weight_name.ends_with(kWeight) ? weight_name.substr(0, weight_name.size() - kWeight.size())
                                        : weight_name;
}

std::string_view skip_reason(const Weight& weight) {
  if (!weight.is_readable() && !weight.is_packed()) return "not a float";
  if (weight.shape.size() != 2 || !weight.name.ends_with(kWeight)) return "not a matrix";
  const std::string_view module = module_of(weight.name);
  const std::string_view last = module.substr(module.rfind('.') + 1);
  if (last.find("embed") != std::string_view::npos || contains(kEmbeddings, last)) {
    return "embedding";
  }
  // At the top of the model: an "output" inside a layer is a layer like others.
  const bool top = std::count(module.begin(), module.end(), '.') <= 1;
  if (last == "lm_head" || (top && contains(kHeads, last))) return "output head";
  if (has_part(module, kRouters)) return "router";
  if (module.find(".experts.") != std::string_view::npos) return "expert";
  return {};
}

void check_orientation(const json::Value& config) {
  const std::string_view type = model_type_of(config);
  if (!contains(kTransposed, type)) return;
  throw Error("config.json: model_type " + text::in_quotes(type) +
              " stores its linear layers transposed (Conv1D); quantising such files is not "
              "supported");
}

}  // namespace monograph
