// Where LoRA on a module of the base goes in llama.cpp; the names are those of gguf/names.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "monograph/adapter/base_modules.h"
#include "monograph/adapter/factors.h"
#include "monograph/gguf/names.h"

namespace monograph {

// By model_type of the base; null if it is not known.
const gguf::Architecture* find_gguf_architecture(const BaseModules& base);

struct GgufPlace {
  std::string tensor;                // "blk.0.attn_q.weight"; of experts without their number
  std::uint64_t permuted_heads = 0;  // heads whose rows are put in llama.cpp's order; 0 for none
};

// The tensor of a module, by its name in the files of the base; `projection` is set for experts:
// "gate", "up" or "down". Nothing if llama.cpp has no tensor that LoRA acts on.
std::optional<GgufPlace> gguf_place(const BaseModules& base, std::string_view stored,
                                    std::string_view projection = {});
std::optional<GgufPlace> gguf_place(const BaseModules& base, const PlacedFactors& placed);

}  // namespace monograph
