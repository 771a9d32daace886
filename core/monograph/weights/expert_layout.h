// How a model has its experts, by model_type: never by how a file stores their bytes.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "monograph/text/json_document.h"

namespace monograph {

// The names that checkpoints and servers have for the matrices of one expert.
enum class ExpertModules : std::uint8_t {
  kNone,        // there are no modules of single experts
  kGateUpDown,  // X.experts.3.gate_proj, up_proj, down_proj
  kW1W3W2,      // X.experts.3.w1, w3, w2
};

// How the outputs of gate_up_proj lie.
enum class GateUp : std::uint8_t {
  kHalves,       // all of gate, then all of up
  kInterleaved,  // gate 0, up 0, gate 1, up 1 ...
};

struct ExpertLayout {
  std::string_view model_type;
  ExpertModules modules = ExpertModules::kNone;
  GateUp gate_up = GateUp::kHalves;
  // Whether plain stacks are stored as [experts, inputs, outputs]. Packed values have outputs for
  // rows in any model.
  bool transposed = false;
};

// nullptr if the experts of this model are not known: what its files show is then all there is.
const ExpertLayout* find_expert_layout(const json::Value& config);

// Whether plain stacks of this model are [experts, inputs, outputs]; false if it is not known.
bool stores_experts_transposed(const json::Value& config);

// Whether this is gpt-oss, whose MXFP4 has names of its own.
bool is_gpt_oss(const json::Value& config);

// The last part of the name of one expert's "gate", "up" or "down"; empty if there is no module.
std::string_view expert_leaf(ExpertModules modules, std::string_view projection);

}  // namespace monograph
