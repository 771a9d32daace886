#include "monograph/merge/plan.h"
#include "monograph/quant_methods/quantization_config.h"
#include "monograph/weights/composed_weight.h"

namespace monograph {

json::Value merged_config(json::Value config, const MergePlan& plan,
                          const MergeSettings& settings) {
  const auto change = [&](json::Value& part) {
    part.erase("quantization_config");
    for (const char* key : {"dtype", "torch_dtype"}) {
      const bool known = part.find(key) != nullptr && part.find(key)->is(json::Kind::kString);
      if (settings.dtype && known) part.set(key, json::Value::string(name_of(*settings.dtype)));
    }
    if (plan.vocabulary != 0 && part.find("vocab_size") != nullptr) {
      part.set("vocab_size", json::Value::number(static_cast<std::int64_t>(plan.vocabulary)));
    }
    if (plan.unties_head) part.set("tie_word_embeddings", json::Value::boolean(false));
  };
  change(config);
  if (settings.format) {
    std::vector<Conversion> conversions;
    for (const MergedWeight& weight : plan.weights) {
      if (weight.members.empty() || weight.packed) {
        conversions.push_back(weight.packed ? *weight.packed : Conversion{.weight = weight.base});
        continue;
      }
      for (const Weight& member : weight.base->composed->sources) {
        conversions.push_back({.weight = &member});
      }
    }
    config.set("quantization_config", quantization_config(config, conversions));
  }
  if (const json::Value* text = config.find("text_config")) {
    json::Value inner = *text;
    change(inner);
    config.set("text_config", std::move(inner));
  }
  return config;
}

}  // namespace monograph
