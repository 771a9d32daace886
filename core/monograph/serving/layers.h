// How servers hold the layers of a model where it matters for LoRA: several modules in one layer,
// and experts one by one.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/adapter/base_modules.h"
#include "monograph/adapter/factors.h"
#include "monograph/serving/servers.h"

namespace monograph {

// Modules that must have LoRA too if `module` has: SGLang stacks q, k and v, and gate and up; vLLM
// the matrices of all experts of a layer. Of experts the next ones only: each of them asks on.
std::vector<std::string> required_with(const BaseModules& base, Server server,
                                       const std::string& module);

// A share of the rows of a stack's matrices, as a module of its own: gate and up are halves, or
// have every second row.
struct ExpertPart {
  std::string_view projection;  // "gate", "up" or "down"
  std::uint64_t first_row = 0, rows = 0, row_step = 1;
};
std::vector<ExpertPart> parts_of(const BaseModules& base, const PlacedFactors& placed);

// The module that one expert's part is in checkpoints and servers: "X.experts.3.gate_proj". Nothing
// where the model has no such modules (gpt-oss, Granite, Llama 4), or it is not known how a model
// has the stack that its files store. llama.cpp has the parts of every model it knows.
std::optional<std::string> single_expert(const BaseModules& base, const PlacedFactors& placed,
                                         std::uint64_t expert, const ExpertPart& part,
                                         Server server);

// Whether adapters with one module an expert need an option of vLLM: its class of this model reads
// them stacked.
bool wants_mixed_format(const BaseModules& base);

}  // namespace monograph
