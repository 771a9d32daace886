// What llama.cpp calls architectures and the tensors of a model.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace monograph::gguf {

enum class Exported : std::uint8_t { kNo, kYes };

struct Architecture {
  std::string_view model_type;  // of config.json
  std::string_view name;        // general.architecture
  // llama.cpp rotates neighbours, transformers the two halves of a head: the rows of q and k are
  // stored in another order (row_order.h).
  bool rotates_neighbours;
  Exported exported;  // whether whole models are written, not only adapters
};

// By model_type; null if it is not known.
const Architecture* find_architecture(std::string_view model_type);
// By general.architecture of a file: the first model type that has it, of a llama with experts
// Mixtral; null if it is not known.
const Architecture* find_named_architecture(std::string_view name, bool has_experts = false);
// The model types of the table, for messages.
std::string model_types();
std::string exported_model_types();
std::string architecture_names();

// The tensor of a module with a matrix, by its name in a checkpoint, without ".weight":
// "blk.0.attn_q" for "model.layers.0.self_attn.q_proj". `projection` is set for experts: "gate",
// "up" or "down". Nothing if llama.cpp has none.
std::optional<std::string> matrix_name(std::string_view module, std::string_view projection = {});
// The same of a norm.
std::optional<std::string> norm_name(const Architecture& architecture, std::string_view module);
// The same of a parameter that is neither: gpt-oss's "model.layers.0.self_attn.sinks".
std::optional<std::string> parameter_name(const Architecture& architecture,
                                          std::string_view parameter);

// The way back, for a tensor without ".weight" or ".bias": "model.layers.0.self_attn.q_proj" for
// "blk.0.attn_q"; gpt-oss's "self_attn.sinks" is a parameter and has no ending there. Experts are
// one tensor of a layer, "model.layers.0.mlp.experts.*.gate_proj" with the expert's number for the
// star; Mixtral's have the names of its files. Nothing if transformers has no such module.
std::optional<std::string> module_name(const Architecture& architecture, std::string_view tensor);

// Whether a module belongs to the eyes or ears of a model, not to its language model.
bool is_other_modality(std::string_view module);

}  // namespace monograph::gguf
