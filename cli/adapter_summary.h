// What inspect says about a PEFT adapter: its settings and the size of each module's change.
#pragma once

#include <string>

#include "model.h"
#include "monograph/text/json_document.h"

namespace monograph::cli {

// `model` was opened with the stem adapter_model, in a folder that holds adapter_config.json.
json::Value adapter_json(const Model& model);
std::string adapter_text(const Model& model, bool markdown);

}  // namespace monograph::cli
