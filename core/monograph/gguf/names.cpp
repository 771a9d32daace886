#include "monograph/gguf/names.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

namespace monograph::gguf {
namespace {

constexpr std::array kArchitectures = {
    Architecture{"gemma", "gemma", false, Exported::kNo},
    Architecture{"gemma2", "gemma2", false, Exported::kNo},
    Architecture{"gemma3_text", "gemma3", false, Exported::kYes},
    Architecture{"gpt_oss", "gpt-oss", false, Exported::kYes},
    Architecture{"llama", "llama", true, Exported::kYes},
    Architecture{"mistral", "llama", true, Exported::kYes},
    Architecture{"mixtral", "llama", true, Exported::kYes},
    Architecture{"phi3", "phi3", false, Exported::kYes},
    Architecture{"qwen2", "qwen2", false, Exported::kYes},
    Architecture{"qwen2_moe", "qwen2moe", false, Exported::kNo},
    Architecture{"qwen3", "qwen3", false, Exported::kYes},
    Architecture{"qwen3_moe", "qwen3moe", false, Exported::kYes},
};

struct Name {
  std::string_view module, tensor;
};
constexpr std::array kLayerNames = {
    Name{"self_attn.q_proj", "attn_q"},
    Name{"self_attn.k_proj", "attn_k"},
    Name{"self_attn.v_proj", "attn_v"},
    Name{"self_attn.o_proj", "attn_output"},
    Name{"mlp.gate_proj", "ffn_gate"},
    Name{"mlp.up_proj", "ffn_up"},
    Name{"mlp.down_proj", "ffn_down"},
    // Phi 3's, one matrix each: the way back depends on the architecture.
    Name{"self_attn.qkv_proj", "attn_qkv"},
    Name{"mlp.gate_up_proj", "ffn_up"},
    Name{"mlp.gate", "ffn_gate_inp"},
    Name{"block_sparse_moe.gate", "ffn_gate_inp"},
    Name{"mlp.router", "ffn_gate_inp"},
    Name{"mlp.shared_expert.gate_proj", "ffn_gate_shexp"},
    Name{"mlp.shared_expert.up_proj", "ffn_up_shexp"},
    Name{"mlp.shared_expert.down_proj", "ffn_down_shexp"},
    Name{"mlp.shared_expert_gate", "ffn_gate_inp_shexp"},
};
constexpr std::array kTopNames = {Name{"embed_tokens", "token_embd"}, Name{"lm_head", "output"}};
constexpr std::array kNorms = {
    Name{"input_layernorm", "attn_norm"},
    Name{"post_attention_layernorm", "ffn_norm"},
    Name{"self_attn.q_norm", "attn_q_norm"},
    Name{"self_attn.k_norm", "attn_k_norm"},
};
// Gemma 2 and 3 have norms behind their blocks too.
constexpr std::array kGemmaNorms = {
    Name{"input_layernorm", "attn_norm"},
    Name{"post_attention_layernorm", "post_attention_norm"},
    Name{"pre_feedforward_layernorm", "ffn_norm"},
    Name{"post_feedforward_layernorm", "post_ffw_norm"},
    Name{"self_attn.q_norm", "attn_q_norm"},
    Name{"self_attn.k_norm", "attn_k_norm"},
};
// gpt-oss has its second norm where Gemma has one behind the block.
constexpr std::array kGptOssNorms = {
    Name{"input_layernorm", "attn_norm"},
    Name{"post_attention_layernorm", "post_attention_norm"},
};
// What belongs to a module and is none.
constexpr std::array kGptOssParameters = {Name{"self_attn.sinks", "attn_sinks"}};
constexpr std::array kTopNorms = {Name{"norm", "output_norm"}};
constexpr std::array<std::string_view, 4> kPrefixes = {"model.language_model.",
                                                       "language_model.model.", "model.", ""};
constexpr std::array<std::string_view, 5> kOtherModalities = {
    "vision_tower.", "vision_model.", "multi_modal_projector.", "audio_tower.", "visual."};

std::optional<std::string> look(std::span<const Name> names, std::string_view module) {
  const auto found = std::find_if(names.begin(), names.end(),
                                  [&](const Name& name) { return name.module == module; });
  if (found == names.end()) return std::nullopt;
  return std::string(found->tensor);
}

// The first module of a tensor.
std::optional<std::string> look_back(std::span<const Name> names, std::string_view tensor) {
  const auto found = std::find_if(names.begin(), names.end(),
                                  [&](const Name& name) { return name.tensor == tensor; });
  if (found == names.end()) return std::nullopt;
  return std::string(found->module);
}

std::optional<std::string> tensor_name(std::string_view module, std::span<const Name> top,
                                       std::span<const Name> layer, std::string_view projection) {
  for (const std::string_view prefix : kPrefixes) {
    if (!module.starts_with(prefix)) continue;
    std::string_view rest = module.substr(prefix.size());
    if (std::optional<std::string> found = look(top, rest)) return found;
    constexpr std::string_view kLayers = "layers.";
    if (!rest.starts_with(kLayers)) continue;
    rest.remove_prefix(kLayers.size());
    const std::size_t digits = rest.find_first_not_of("0123456789");
    if (digits == 0 || digits == std::string_view::npos || rest[digits] != '.') continue;
    const std::string block = "blk." + std::string(rest.substr(0, digits)) + ".";
    if (!projection.empty()) return block + "ffn_" + std::string(projection) + "_exps";
    if (const auto found = look(layer, rest.substr(digits + 1))) return block + *found;
  }
  return std::nullopt;
}

// Below a million layers, as there are tensors.
constexpr std::size_t kLayerDigits = 6;

bool has_norms_behind(const Architecture& architecture) {
  return architecture.name == "gemma2" || architecture.name == "gemma3";
}

bool is_gpt_oss(const Architecture& architecture) { return architecture.name == "gpt-oss"; }

bool is_mixtral(const Architecture& architecture) { return architecture.model_type == "mixtral"; }

// Below a layer, with a star for the number of the expert; nothing if it is no stack of experts.
std::optional<std::string> experts_name(const Architecture& architecture, std::string_view tensor) {
  const bool mixtral = is_mixtral(architecture);
  if (!mixtral && !is_gpt_oss(architecture) && !architecture.name.ends_with("moe")) {
    return std::nullopt;
  }
  for (const auto& [projection, numbered] :
       {std::pair("gate", "w1"), std::pair("up", "w3"), std::pair("down", "w2")}) {
    if (tensor != "ffn_" + std::string(projection) + "_exps") continue;
    return mixtral ? "block_sparse_moe.experts.*." + std::string(numbered)
                   : "mlp.experts.*." + std::string(projection) + "_proj";
  }
  return std::nullopt;
}

std::span<const Name> norms_of(const Architecture& architecture) {
  if (is_gpt_oss(architecture)) return kGptOssNorms;
  if (has_norms_behind(architecture)) return kGemmaNorms;
  return kNorms;
}

template <class Wanted>
std::string listed(Wanted wanted) {
  std::string text;
  for (const Architecture& row : kArchitectures) {
    if (!wanted(row)) continue;
    text += (text.empty() ? "" : ", ") + std::string(row.model_type);
  }
  return text;
}

}  // namespace

const Architecture* find_architecture(std::string_view model_type) {
  const auto* found =
      std::find_if(kArchitectures.begin(), kArchitectures.end(),
                   [&](const Architecture& row) { return row.model_type == model_type; });
  return found == kArchitectures.end() ? nullptr : found;
}

const Architecture* find_named_architecture(std::string_view name, bool has_experts) {
  if (has_experts && name == "llama") return find_architecture("mixtral");
  const auto* found = std::find_if(kArchitectures.begin(), kArchitectures.end(),
                                   [&](const Architecture& row) { return row.name == name; });
  return found == kArchitectures.end() ? nullptr : found;
}

std::string model_types() {
  return listed([](const Architecture&) { return true; });
}

std::string exported_model_types() {
  return listed([](const Architecture& row) { return row.exported == Exported::kYes; });
}

std::string architecture_names() {
  std::string text;
  std::string_view last;
  for (const Architecture& row : kArchitectures) {
    if (row.name != last) text.append(text.empty() ? "" : ", ").append(row.name);
    last = row.name;
  }
  return text;
}

std::optional<std::string> matrix_name(std::string_view module, std::string_view projection) {
  return tensor_name(module, kTopNames, kLayerNames, projection);
}

std::optional<std::string> norm_name(const Architecture& architecture, std::string_view module) {
  return tensor_name(module, kTopNorms, norms_of(architecture), {});
}

std::optional<std::string> parameter_name(const Architecture& architecture,
                                          std::string_view parameter) {
  if (!is_gpt_oss(architecture)) return std::nullopt;
  return tensor_name(parameter, {}, kGptOssParameters, {});
}

std::optional<std::string> module_name(const Architecture& architecture, std::string_view tensor) {
  if (tensor == "output") return "lm_head";
  for (const std::span<const Name> names :
       {std::span<const Name>(kTopNames), std::span<const Name>(kTopNorms)}) {
    if (const auto found = look_back(names, tensor)) return "model." + *found;
  }
  constexpr std::string_view kBlock = "blk.";
  if (!tensor.starts_with(kBlock)) return std::nullopt;
  tensor.remove_prefix(kBlock.size());
  const std::size_t digits = tensor.find_first_not_of("0123456789");
  if (digits == 0 || digits == std::string_view::npos || tensor[digits] != '.') return std::nullopt;
  // "00" would be a layer beside "0".
  if (digits > kLayerDigits || (digits > 1 && tensor[0] == '0')) return std::nullopt;
  const std::string layer = "model.layers." + std::string(tensor.substr(0, digits)) + ".";
  const std::string_view rest = tensor.substr(digits + 1);
  if (architecture.name == "phi3" && rest == "ffn_up") return layer + "mlp.gate_up_proj";
  const bool gpt_oss = is_gpt_oss(architecture);
  if (gpt_oss && rest == "ffn_gate_inp") return layer + "mlp.router";
  if (const auto found = gpt_oss ? look_back(kGptOssParameters, rest) : std::nullopt) {
    return layer + *found;
  }
  if (is_mixtral(architecture) && rest == "ffn_gate_inp") return layer + "block_sparse_moe.gate";
  if (const auto experts = experts_name(architecture, rest)) return layer + *experts;
  for (const std::span<const Name> names :
       {std::span<const Name>(kLayerNames), norms_of(architecture)}) {
    if (const auto found = look_back(names, rest)) return layer + *found;
  }
  return std::nullopt;
}

bool is_other_modality(std::string_view module) {
  constexpr std::string_view kModel = "model.";
  if (module.starts_with(kModel)) module.remove_prefix(kModel.size());
  return std::any_of(kOtherModalities.begin(), kOtherModalities.end(),
                     [&](std::string_view begin) { return module.starts_with(begin); });
}

}  // namespace monograph::gguf
