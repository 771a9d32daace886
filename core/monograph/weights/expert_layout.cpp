#include "monograph/weights/expert_layout.h"

#include <algorithm>

#include "monograph/weights/model_settings.h"

namespace monograph {
namespace {

using enum ExpertModules;
using enum GateUp;

// Read in the classes and conversion mappings of transformers 5. Sorted by name.
constexpr std::array kLayouts = {
    ExpertLayout{"afmoe", kGateUpDown, kHalves, false},
    ExpertLayout{"axk1", kGateUpDown, kHalves, false},
    ExpertLayout{"axk2", kGateUpDown, kHalves, false},
    ExpertLayout{"cohere2_moe", kGateUpDown, kHalves, false},
    ExpertLayout{"deepseek_v2", kGateUpDown, kHalves, false},
    ExpertLayout{"deepseek_v3", kGateUpDown, kHalves, false},
    ExpertLayout{"deepseek_v32", kGateUpDown, kHalves, false},
    ExpertLayout{"dots1", kGateUpDown, kHalves, false},
    ExpertLayout{"ernie4_5_moe", kGateUpDown, kHalves, false},
    ExpertLayout{"exaone_moe", kGateUpDown, kHalves, false},
    ExpertLayout{"flex_olmo", kGateUpDown, kHalves, false},
    ExpertLayout{"glm4_moe", kGateUpDown, kHalves, false},
    ExpertLayout{"glm4_moe_lite", kGateUpDown, kHalves, false},
    ExpertLayout{"glm4v_moe", kGateUpDown, kHalves, false},
    ExpertLayout{"glm4v_moe_text", kGateUpDown, kHalves, false},
    ExpertLayout{"glm_moe_dsa", kGateUpDown, kHalves, false},
    ExpertLayout{"gpt_oss", kNone, kInterleaved, true},
    ExpertLayout{"granitemoe", kNone, kHalves, false},
    ExpertLayout{"granitemoehybrid", kNone, kHalves, false},
    ExpertLayout{"granitemoeshared", kNone, kHalves, false},
    ExpertLayout{"hunyuan_v1_moe", kGateUpDown, kHalves, false},
    ExpertLayout{"hy_v3", kGateUpDown, kHalves, false},
    ExpertLayout{"jamba", kGateUpDown, kHalves, false},
    ExpertLayout{"lfm2_moe", kW1W3W2, kHalves, false},
    ExpertLayout{"llama4", kNone, kHalves, true},
    ExpertLayout{"llama4_text", kNone, kHalves, true},
    ExpertLayout{"longcat_flash", kGateUpDown, kHalves, false},
    ExpertLayout{"mimo_v2_flash", kGateUpDown, kHalves, false},
    ExpertLayout{"minimax", kW1W3W2, kHalves, false},
    ExpertLayout{"minimax_m2", kW1W3W2, kHalves, false},
    ExpertLayout{"mixtral", kW1W3W2, kHalves, false},
    ExpertLayout{"nemotron_h", kGateUpDown, kHalves, false},
    ExpertLayout{"olmoe", kGateUpDown, kHalves, false},
    ExpertLayout{"phimoe", kW1W3W2, kHalves, false},
    ExpertLayout{"qwen2_moe", kGateUpDown, kHalves, false},
    ExpertLayout{"qwen3_5_moe", kGateUpDown, kHalves, false},
    ExpertLayout{"qwen3_5_moe_text", kGateUpDown, kHalves, false},
    ExpertLayout{"qwen3_moe", kGateUpDown, kHalves, false},
    ExpertLayout{"qwen3_next", kGateUpDown, kHalves, false},
    ExpertLayout{"qwen3_omni_moe_text", kGateUpDown, kHalves, false},
    ExpertLayout{"qwen3_vl_moe", kGateUpDown, kHalves, true},
    ExpertLayout{"qwen3_vl_moe_text", kGateUpDown, kHalves, true},
    ExpertLayout{"solar_open", kGateUpDown, kHalves, false},
};
static_assert(std::is_sorted(kLayouts.begin(), kLayouts.end(), [](const auto& a, const auto& b) {
  return a.model_type < b.model_type;
}));

}  // namespace

const ExpertLayout* find_expert_layout(const json::Value& config) {
  const std::string_view type = model_type_of(config);
  const auto* found = std::find_if(kLayouts.begin(), kLayouts.end(),
                                   [&](const ExpertLayout& row) { return row.model_type == type; });
  return found == kLayouts.end() ? nullptr : found;
}

bool stores_experts_transposed(const json::Value& config) {
  const ExpertLayout* layout = find_expert_layout(config);
  return layout != nullptr && layout->transposed;
}

bool is_gpt_oss(const json::Value& config) { return model_type_of(config) == "gpt_oss"; }

std::string_view expert_leaf(ExpertModules modules, std::string_view projection) {
  const bool numbered = modules == kW1W3W2;
  if (modules == kNone) return {};
  if (projection == "gate") return numbered ? "w1" : "gate_proj";
  if (projection == "up") return numbered ? "w3" : "up_proj";
  return numbered ? "w2" : "down_proj";
}

}  // namespace monograph
