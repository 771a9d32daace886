// Which tensors a GGUF file of a model has.
#include <map>
#include <optional>

#include "monograph/base/error.h"
#include "monograph/gguf/export.h"
#include "monograph/gguf/mixture.h"
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

class Planner {
 public:
  Planner(const std::vector<Weight>& weights, ModelConfig config, TensorType type) : type_(type) {
    plan_.config = std::move(config);
    for (const Weight& weight : weights) sort_in(weight);
  }

  ExportPlan make() {
    const ModelConfig& c = plan_.config;
    const std::uint64_t queries = c.heads * c.head_dim, keys = c.kv_heads * c.head_dim;
    add("token_embd.weight", {c.vocabulary, c.hidden});
    for (std::uint64_t layer = 0; layer < c.layers; ++layer) {
      const std::string block = "blk." + std::to_string(layer) + ".";
      add(block + "attn_norm.weight", {c.hidden});
      add_linear(block + "attn_q", queries, c.hidden);
      add_linear(block + "attn_k", keys, c.hidden);
      add_linear(block + "attn_v", keys, c.hidden);
      add_linear(block + "attn_output", c.hidden, queries);
      if (c.has_head_norms()) {
        add(block + "attn_q_norm.weight", {c.head_dim});
        add(block + "attn_k_norm.weight", {c.head_dim});
      }
      add(block + "ffn_norm.weight", {c.hidden});
      add_linear(block + "ffn_gate", c.intermediate, c.hidden);
      add_linear(block + "ffn_up", c.intermediate, c.hidden);
      add_linear(block + "ffn_down", c.hidden, c.intermediate);
      if (c.is_gemma()) {
        add(block + "post_attention_norm.weight", {c.hidden});
        add(block + "post_ffw_norm.weight", {c.hidden});
      }
    }
    add("output_norm.weight", {c.hidden});
    if (!c.tied) add("output.weight", {c.vocabulary, c.hidden});
    if (std::vector<float> factors = rope_factors(c); !factors.empty()) {
      ExportedTensor& tensor = plan_.tensors.emplace_back();
      tensor.info.name = "rope_freqs.weight";
      tensor.info.shape = {factors.size()};
      tensor.values = std::move(factors);
    }
    if (c.tied && found_.contains("output.weight")) {
      plan_.left_out.push_back(found_.extract("output.weight").mapped()->name);
    }
    if (!found_.empty()) refuse(*found_.begin()->second);
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
    std::optional<std::string> tensor = matrix_name(module);
    if (!tensor && kind == ".weight") tensor = norm_name(*plan_.config.architecture, module);
    if (!tensor || (kind != ".weight" && kind != ".bias")) refuse(weight);
    const auto [other, added] = found_.emplace(*tensor + std::string(kind), &weight);
    if (!added) {
      throw Error("weights " + in_quotes(other->second->name) + " and " + in_quotes(weight.name) +
                  " are both " + in_quotes(other->first));
    }
  }

  void add_linear(const std::string& name, std::uint64_t rows, std::uint64_t cols) {
    add(name + ".weight", {rows, cols});
    // Of the known architectures llama.cpp's "llama" alone adds them.
    if (plan_.config.architecture->name == "llama" && found_.contains(name + ".bias")) {
      add(name + ".bias", {rows});
    }
  }

  void add(const std::string& name, const Shape& shape) {
    auto node = found_.extract(name);
    if (node.empty()) throw Error("the model has no weight for llama.cpp's " + in_quotes(name));
    const Weight& weight = *node.mapped();
    if (weight.shape != shape) {
      throw Error("weight " + in_quotes(weight.name) + ": is " + shown(weight.shape) +
                  ", config.json says " + shown(shape));
    }
    if (!weight.is_readable()) {
      throw Error("weight " + in_quotes(weight.name) + ": cannot decode " +
                  std::string(weight.format) + " (" + std::string(weight.quant_method) + ")");
    }
    ExportedTensor& tensor = plan_.tensors.emplace_back();
    tensor.info = {name, type_for(name, shape), shape};
    tensor.weight = &weight;
    tensor.add_one = plan_.config.is_gemma() && ends(name, "norm.weight");
    const bool permuted =
        name.find(".attn_q.") != std::string::npos || name.find(".attn_k.") != std::string::npos;
    if (plan_.config.architecture->rotates_neighbours && permuted) {
      tensor.permuted_head_rows = plan_.config.head_dim;
    }
  }

  TensorType type_for(const std::string& name, const Shape& shape) {
    if (shape.size() < 2) return TensorType::kF32;
    const bool four_bits = type_ == TensorType::kQ4 || type_ == TensorType::kMxfp4;
    const bool outer = name == "token_embd.weight" || name == "output.weight";
    TensorType type = four_bits && outer ? TensorType::kQ8 : type_;
    if (is_mixture(type_)) {
      type = mixed_type(plan_.config, type_, name, shape.back());
      if (!is_mixture(type)) plan_.fallbacks.push_back(name);
      return type;
    }
    if (shape.back() % info_of(type).block_elements == 0) return type;
    plan_.fallbacks.push_back(name);
    return TensorType::kF16;
  }

  TensorType type_;
  ExportPlan plan_;
  std::map<std::string, const Weight*> found_;  // by llama.cpp's name, until they are placed
};

}  // namespace

ExportPlan plan_export(const std::vector<Weight>& weights, ModelConfig config, TensorType type) {
  return Planner(weights, std::move(config), type).make();
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
