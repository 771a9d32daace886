// How far each position turns a head, as config.json says it. A step of import_config.
#pragma once

#include "monograph/gguf/import_keys.h"

namespace monograph::gguf {

void add_rope(json::Value& config, const ArchitectureKeys& keys, std::uint64_t head_dim);

// Phi 3: a part of each head turns; long contexts have what each frequency is divided by, for short
// and for long texts.
void add_phi_rope(json::Value& config, const ArchitectureKeys& keys, std::uint64_t head_dim);

}  // namespace monograph::gguf
