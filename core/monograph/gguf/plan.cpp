// Which tensors a GGUF file of a model has.
#include <map>
#include <optional>

#include "monograph/base/error.h"
#include "monograph/gguf/export.h"
#include "monograph/gguf/mixture.h"
#include "monograph/gguf/mxfp4_blocks.h"
#include "monograph/text/utf8.h"

namespace monograph::gguf {
namespace {

using text::in_quotes;
using Shape = std::vector<std::uint64_t>;

std::string shown(const Shape& shape) {
  std::string text;
  for (const std::uint64_t size : shape) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text.empty() ? "no dimensions" : text;
}

bool ends(std::string_view name, std::string_view end) { return name.ends_with(end); }

// What a tensor is made of.
struct Source {
  const Weight* weight = nullptr;
  RowsOfExperts rows;

  Shape shape() const {
    Shape shape = weight->shape;
    if (rows.all != 0) shape[1] /= 2;
    return shape;
  }
};

class Planner {
 public:
  Planner(const std::vector<Weight>& weights, ExpertStacks experts, ModelConfig config,
          TensorType type, bool keeps_mxfp4)
      : type_(type), keeps_mxfp4_(keeps_mxfp4) {
    plan_.config = std::move(config);
    plan_.experts = std::make_shared<const ExpertStacks>(std::move(experts));
    if (!plan_.experts->refused.empty()) {
      const auto& [name, why] = *plan_.experts->refused.begin();
      throw Error("experts " + in_quotes(name) + ": " + why);
    }
    for (const Weight& stack : plan_.experts->stacks) sort_in_stack(stack);
    for (const Weight& weight : weights) {
      if (!plan_.experts->members.contains(&weight)) sort_in(weight);
    }
  }

  ExportPlan make() {
    const ModelConfig& c = plan_.config;
    add("token_embd.weight", {c.vocabulary, c.hidden});
    for (std::uint64_t layer = 0; layer < c.layers; ++layer) {
      const std::string block = "blk." + std::to_string(layer) + ".";
      add(block + "attn_norm.weight", {c.hidden});
      add_attention(block);
      add(block + (c.is_gpt_oss() ? "post_attention_norm.weight" : "ffn_norm.weight"), {c.hidden});
      if (c.experts != 0) {
        add_experts(block);
      } else if (c.is_phi()) {
        add_linear(block + "ffn_up", 2 * c.intermediate, c.hidden);
        add_linear(block + "ffn_down", c.hidden, c.intermediate);
      } else {
        add_linear(block + "ffn_gate", c.intermediate, c.hidden);
        add_linear(block + "ffn_up", c.intermediate, c.hidden);
        add_linear(block + "ffn_down", c.hidden, c.intermediate);
      }
      if (c.is_gemma()) {
        add(block + "post_attention_norm.weight", {c.hidden});
        add(block + "post_ffw_norm.weight", {c.hidden});
      }
    }
    add("output_norm.weight", {c.hidden});
    if (!c.tied) add("output.weight", {c.vocabulary, c.hidden});
    add_values("rope_freqs.weight", rope_factors(c));
    add_values("rope_factors_long.weight", c.rope.long_factors);
    add_values("rope_factors_short.weight", c.rope.short_factors);
    if (c.tied && found_.contains("output.weight")) {
      plan_.left_out.push_back(found_.extract("output.weight").mapped().weight->name);
    }
    if (!found_.empty()) refuse(*found_.begin()->second.weight);
    return std::move(plan_);
  }

 private:
  [[noreturn]] void refuse(const Weight& weight) const {
    throw Error("weight " + in_quotes(weight.name) + ": llama.cpp has no tensor for it in " +
                std::string(plan_.config.architecture->name));
  }

  void sort_in(const Weight& weight) {
    const std::size_t dot = weight.name.rfind('.');
    const std::string_view name = weight.name;
    const std::string_view module = name.substr(0, dot == std::string::npos ? 0 : dot);
    const std::string_view kind = dot == std::string::npos ? name : name.substr(dot);
    if (is_other_modality(name)) {
      plan_.left_out.push_back(weight.name);
      return;
    }
    if (ends(name, ".rotary_emb.inv_freq")) return;  // of old Llama folders; it is computed
    if (plan_.config.is_gpt_oss() && sort_in_parameter(weight)) return;
    std::optional<std::string> tensor = matrix_name(module);
    if (!tensor && kind == ".weight") tensor = norm_name(*plan_.config.architecture, module);
    if (!tensor || (kind != ".weight" && kind != ".bias")) refuse(weight);
    sort_in(*tensor + std::string(kind), {&weight, {}});
  }

  void sort_in(const std::string& tensor, const Source& source) {
    const auto [other, added] = found_.emplace(tensor, source);
    if (added) return;
    throw Error("weights " + in_quotes(other->second.weight->name) + " and " +
                in_quotes(source.weight->name) + " are both " + in_quotes(other->first));
  }

  // Of gpt-oss what belongs to no module, but to attention and to all experts.
  bool sort_in_parameter(const Weight& weight) {
    const std::string_view name = weight.name;
    if (const auto tensor = parameter_name(*plan_.config.architecture, name)) {
      sort_in(*tensor + ".weight", {&weight, {}});
      return true;
    }
    const bool pair = ends(name, ".experts.gate_up_proj_bias");
    if (!pair && !ends(name, ".experts.down_proj_bias")) return false;
    const std::string_view module = name.substr(0, name.rfind('.'));
    for (const auto& [projection, first] : {std::pair("gate", 0), std::pair("up", 1)}) {
      const auto tensor = matrix_name(module, pair ? projection : "down");
      if (!tensor || weight.shape.size() != 2 || weight.shape[1] % 2 != 0) refuse(weight);
      RowsOfExperts rows;
      if (pair) rows = {weight.shape[1], static_cast<std::uint64_t>(first), 2};
      sort_in(*tensor + ".bias", {&weight, rows});
      if (!pair) break;
    }
    return true;
  }

  // Gate and up of a stack become two tensors.
  void sort_in_stack(const Weight& stack) {
    const std::string_view parameter = stack_parameter(stack.name);
    const std::string_view module = std::string_view(stack.name).substr(0, stack.name.rfind('.'));
    const auto tensor = [&](std::string_view projection) {
      const std::optional<std::string> name = matrix_name(module, projection);
      if (!name) refuse(stack);
      return *name + ".weight";
    };
    if (parameter == "down_proj") return sort_in(tensor("down"), {&stack, {}});
    if (parameter != "gate_up_proj" || stack.shape[1] % 2 != 0) refuse(stack);
    const std::uint64_t all = stack.shape[1];
    const bool in_turns = plan_.config.is_gpt_oss();
    sort_in(tensor("gate"), {&stack, {all, 0, in_turns ? 2U : 1U}});
    sort_in(tensor("up"), {&stack, {all, in_turns ? 1 : all / 2, in_turns ? 2U : 1U}});
  }

  void add_values(const char* name, std::vector<float> values) {
    if (values.empty()) return;
    ExportedTensor& tensor = plan_.tensors.emplace_back();
    tensor.info.name = name;
    tensor.info.shape = {values.size()};
    tensor.values = std::move(values);
  }

  void add_attention(const std::string& block) {
    const ModelConfig& c = plan_.config;
    const std::uint64_t queries = c.heads * c.head_dim, keys = c.kv_heads * c.head_dim;
    if (c.is_phi()) {
      add_linear(block + "attn_qkv", queries + 2 * keys, c.hidden);
    } else {
      add_linear(block + "attn_q", queries, c.hidden);
      add_linear(block + "attn_k", keys, c.hidden);
      add_linear(block + "attn_v", keys, c.hidden);
    }
    add_linear(block + "attn_output", c.hidden, queries);
    if (c.is_gpt_oss()) add(block + "attn_sinks.weight", {c.heads});
    if (!c.has_head_norms()) return;
    add(block + "attn_q_norm.weight", {c.head_dim});
    add(block + "attn_k_norm.weight", {c.head_dim});
  }

  void add_linear(const std::string& name, std::uint64_t rows, std::uint64_t cols) {
    add(name + ".weight", {rows, cols});
    // llama.cpp's "llama" adds those that are there, qwen2 and gpt-oss have them always.
    const std::string_view architecture = plan_.config.architecture->name;
    const bool optional = architecture == "llama" && found_.contains(name + ".bias");
    const bool of_qwen = architecture == "qwen2" && name.find(".attn_") != std::string::npos &&
                         !ends(name, ".attn_output");
    if (optional || of_qwen || plan_.config.is_gpt_oss()) add(name + ".bias", {rows});
  }

  void add_experts(const std::string& block) {
    const ModelConfig& c = plan_.config;
    add(block + "ffn_gate_inp.weight", {c.experts, c.hidden});
    add(block + "ffn_gate_exps.weight", {c.experts, c.expert_intermediate, c.hidden});
    add(block + "ffn_up_exps.weight", {c.experts, c.expert_intermediate, c.hidden});
    add(block + "ffn_down_exps.weight", {c.experts, c.hidden, c.expert_intermediate});
    if (!c.is_gpt_oss()) return;
    add(block + "ffn_gate_inp.bias", {c.experts});
    add(block + "ffn_gate_exps.bias", {c.experts, c.expert_intermediate});
    add(block + "ffn_up_exps.bias", {c.experts, c.expert_intermediate});
    add(block + "ffn_down_exps.bias", {c.experts, c.hidden});
  }

  void add(const std::string& name, const Shape& shape) {
    auto node = found_.extract(name);
    if (node.empty()) throw Error("the model has no weight for llama.cpp's " + in_quotes(name));
    const Weight& weight = *node.mapped().weight;
    if (const Shape found = node.mapped().shape(); found != shape) {
      throw Error("weight " + in_quotes(weight.name) + ": " + in_quotes(name) + " is " +
                  shown(found) + ", config.json says " + shown(shape));
    }
    if (!weight.is_readable()) {
      throw Error("weight " + in_quotes(weight.name) + ": cannot decode " +
                  std::string(weight.format) + " (" + std::string(weight.quant_method) + ")");
    }
    ExportedTensor& tensor = plan_.tensors.emplace_back();
    const bool mxfp4 = has_mxfp4_blocks(weight);
    const bool kept = mxfp4 && keeps_mxfp4_ && is_of_experts(name);
    tensor.info = {name, kept ? TensorType::kMxfp4 : type_for(name, shape), shape};
    tensor.weight = &weight;
    tensor.rows_of_experts = node.mapped().rows;
    tensor.add_one = plan_.config.is_gemma() && ends(name, "norm.weight");
    const bool permuted =
        name.find(".attn_q.") != std::string::npos || name.find(".attn_k.") != std::string::npos;
    if (plan_.config.architecture->rotates_neighbours && permuted) {
      tensor.permuted_head_rows = plan_.config.head_dim;
    }
    tensor.keeps_blocks =
        mxfp4 && tensor.info.type == TensorType::kMxfp4 && tensor.permuted_head_rows == 0;
  }

  TensorType type_for(const std::string& name, const Shape& shape) {
    if (shape.size() < 2 || is_router(name) || ends(name, ".bias")) return TensorType::kF32;
    const bool four_bits = type_ == TensorType::kQ4 || type_ == TensorType::kMxfp4;
    const bool outer = name == "token_embd.weight" || name == "output.weight";
    const bool shared =
        type_ == TensorType::kMxfp4 && plan_.config.experts != 0 && !is_of_experts(name);
    TensorType type = four_bits && (outer || shared) ? TensorType::kQ8 : type_;
    if (is_mixture(type_)) {
      type = mixed_type(plan_.config, type_, name, shape.back());
      if (!is_mixture(type) && shape.back() % 256 != 0) plan_.fallbacks.push_back(name);
      return type;
    }
    if (shape.back() % info_of(type).block_elements == 0) return type;
    plan_.fallbacks.push_back(name);
    return TensorType::kF16;
  }

  TensorType type_;
  bool keeps_mxfp4_;
  ExportPlan plan_;
  std::map<std::string, Source> found_;  // by llama.cpp's name, until they are placed
};

}  // namespace

std::uint64_t rows_of(const ExportedTensor& tensor) {
  std::uint64_t rows = 1;
  for (std::size_t i = 0; i + 1 < tensor.info.shape.size(); ++i) rows *= tensor.info.shape[i];
  return rows;
}

ExportPlan plan_export(const std::vector<Weight>& weights, ExpertStacks experts, ModelConfig config,
                       TensorType type, bool keeps_mxfp4) {
  return Planner(weights, std::move(experts), std::move(config), type, keeps_mxfp4).make();
}

Metadata export_metadata(const ExportPlan& plan, const Tokenizer& tokenizer, TensorType type,
                         const std::string& name) {
  Metadata metadata;
  metadata.add("general.architecture", plan.config.architecture->name);
  metadata.add("general.type", "model");
  metadata.add("general.name", name);
  metadata.add("general.file_type", info_of(type).file_type);
  if (info_of(type).block_elements != 1) {
    metadata.add("general.quantization_version", std::uint32_t{2});
  }
  add_architecture(metadata, plan.config);
  metadata.append(tokenizer.metadata);
  return metadata;
}

}  // namespace monograph::gguf
