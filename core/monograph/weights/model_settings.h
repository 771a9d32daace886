// Settings of a model's config.json: of its language model where a config has several parts.
#pragma once

#include <cstdint>
#include <string_view>

#include "monograph/text/json_document.h"

namespace monograph {

// That of text_config, else that at the top; null counts as absent. nullptr if there is none.
const json::Value* find_setting(const json::Value& config, std::string_view key);

// Empty if the config does not say.
std::string_view model_type_of(const json::Value& config);

// 0 if there is none.
std::uint64_t number_setting(const json::Value& config, std::string_view key);

// Whether any part of the config says that head and input embedding are one tensor.
bool config_says_tied(const json::Value& config);

}  // namespace monograph
