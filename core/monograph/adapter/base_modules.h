// The modules of a base model by the names that an adapter has for them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/text/json_document.h"
#include "monograph/weights/experts.h"
#include "monograph/weights/model_settings.h"
#include "monograph/weights/weight.h"

namespace monograph {

// A matrix that a LoRA may act on.
struct BaseMatrix {
  const Weight* weight = nullptr;  // holds it: the matrix itself, or a stack of experts
  std::string stored;              // its module in the files of the base: "model.layers.0.mlp.gate"
  // [outputs, inputs] as stored; of one expert of a stack: that matrix.
  std::vector<std::uint64_t> shape;
  bool embedding = false, head = false;
};

// A stack that transformers has as one parameter of a module: "gate_up_proj" of "X.mlp.experts".
struct BaseStack {
  const Weight* stack = nullptr;  // [experts, outputs, inputs]
  std::string parameter;
};

class BaseModules {
 public:
  // All must outlive the object.
  BaseModules(const std::vector<Weight>& weights, const json::Value& config);

  // The matrix of a module; that of a head that is not stored is the embedding's. Also single
  // experts, "X.experts.3.up_proj", of a base that stores stacks.
  std::optional<BaseMatrix> find(const std::string& module) const;
  // The stacks of a module of experts, in the order of their parameters.
  std::vector<BaseStack> stacks_of(const std::string& module) const;
  // How the model has its experts; nullptr if that is not known.
  const ExpertLayout* expert_layout() const { return layout_; }
  // Whether it is known to have modules of single experts.
  bool has_single_experts() const {
    return layout_ != nullptr && layout_->modules != ExpertModules::kNone;
  }
  // Whether head and input embedding are one tensor.
  bool is_tied() const { return tied_; }
  const json::Value& config() const { return config_; }
  // model_type of the config; of its language model where it has several parts.
  std::string_view model_type() const { return model_type_of(config_); }
  // A number of the config, or of its language model; 0 if there is none.
  std::uint64_t number(std::string_view key) const { return number_setting(config_, key); }
  // The one module of the base whose name ends as `module` does from "layers." on; else empty.
  std::string same_tail(std::string_view module) const;

 private:
  const Weight* look(const std::string& name) const;
  std::optional<BaseMatrix> find_expert(const std::string& module) const;

  const json::Value& config_;
  std::map<std::string_view, const Weight*> weights_;
  ExpertStacks stacks_;
  const ExpertLayout* layout_ = nullptr;
  const Weight* embedding_ = nullptr;
  bool tied_ = false;
};

}  // namespace monograph
