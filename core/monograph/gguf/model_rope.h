// The rotary embedding of a config.json, as far as llama.cpp computes it.
#pragma once

#include <cstdint>

#include "monograph/gguf/config_settings.h"
#include "monograph/gguf/model_config.h"

namespace monograph::gguf {

// Of `config` the architecture, the context and the sizes of heads are known. Throws Error for
// what the graph of the architecture has not.
Rope read_rope(const ConfigSettings& settings, const ModelConfig& config, double default_theta);

// The base of a set of rope_parameters, which may be null, else of the key that came before them.
double theta_of(const ConfigSettings& settings, const json::Value* parameters, std::string_view key,
                double otherwise);

}  // namespace monograph::gguf
