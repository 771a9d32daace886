#include "monograph/weights/model_settings.h"

namespace monograph {

const json::Value* find_setting(const json::Value& config, std::string_view key) {
  const auto look = [&](const json::Value* part) -> const json::Value* {
    if (part == nullptr || !part->is(json::Kind::kObject)) return nullptr;
    const json::Value* found = part->find(key);
    return found == nullptr || found->is(json::Kind::kNull) ? nullptr : found;
  };
  if (!config.is(json::Kind::kObject)) return nullptr;
  const json::Value* found = look(config.find("text_config"));
  return found != nullptr ? found : look(&config);
}

std::string_view model_type_of(const json::Value& config) {
  const json::Value* type = find_setting(config, "model_type");
  return type == nullptr ? std::string_view() : type->as_string().value_or("");
}

std::uint64_t number_setting(const json::Value& config, std::string_view key) {
  const json::Value* value = find_setting(config, key);
  return value == nullptr ? 0 : value->as_unsigned().value_or(0);
}

bool config_says_tied(const json::Value& config) {
  const auto says = [](const json::Value* part) {
    const json::Value* tied = part == nullptr || !part->is(json::Kind::kObject)
                                  ? nullptr
                                  : part->find("tie_word_embeddings");
    return tied != nullptr && tied->as_bool().value_or(false);
  };
  return says(&config) || (config.is(json::Kind::kObject) && says(config.find("text_config")));
}

}  // namespace monograph
