// Decides a MergePlan: planner.cpp what adapters do to single weights, planner_experts.cpp what
// they do to stacks of experts, planner_output.cpp what is stored.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/adapter/factor_order.h"
#include "monograph/merge/plan.h"
#include "monograph/weights/experts.h"

namespace monograph {

class Planner {
 public:
  Planner(const std::vector<Weight>& weights, const json::Value& config,
          const MergeSettings& settings);
  void apply(const WeightedAdapter& adapter);
  MergePlan finish();

 private:
  [[noreturn]] void fail(std::string_view tensor, const std::string& what) const;
  MergedWeight& add_base(const std::string& name, const Weight& base);
  // Whether the output has the stack in a packed format.
  bool is_packed_in_output(const Weight& stack) const;
  // A stack that the base stores as one tensor: packed with outputs for rows, plain as the model's
  // class has it.
  void see_stack(MergedWeight& weight, const Weight& stack);
  // A stack that the base stores one by one, as one weight: written as such, or apart again.
  MergedWeight& put_together(const Weight& stack);
  // PEFT wraps a module once for each of its parameters, in their order.
  void add_loras_of_parameters();
  void add_loras_of_module(const std::string& module, const std::vector<const LowRank*>& loras);
  void add_lora_of_experts(const std::string& key, const Weight& stack, const LowRank& lora,
                           FactorOrder order);
  // To the matrices of a stack, which are packed each on its own.
  void add_lora_one_by_one(const Weight& stack, LowRankChange change, bool is_transposed);
  // The weight that an adapter names; a head that is not stored is made from the embedding.
  MergedWeight& find(const std::string& name);
  const MergedWeight* find_embedding() const;
  // A weight of any other type is copied, so what an adapter does to it would be lost.
  void need_float(const MergedWeight& weight, const char* what) const;
  void need_weight_one(std::string_view tensor, const char* what) const;
  void replace(const std::string& name, const safetensors::LocatedTensor& with);
  static bool has_vocabulary(std::string_view name);
  void add_rows(MergedWeight& weight, std::uint64_t count);
  // Embedding and head of a vocabulary that grew, which must have grown alike.
  void check_vocabulary() const;
  void add_lora(const std::string& module, const LowRank& lora);
  void add_bias(const std::string& module, const LowRank& lora, double factor);
  void set_tokens(const std::string& name, const TokenRows& rows);
  void untie_if_needed();
  // Whether the output has the weight in settings.format.
  bool is_packed(const MergedWeight& weight, bool linear) const;
  const Weight* outputs_first(const MergedWeight& weight);
  void set_type(MergedWeight& weight);
  void set_rounding(MergedWeight& weight);

  const json::Value& config_;
  const MergeSettings& settings_;
  ExpertStacks stacks_;
  bool gpt_oss_ = false;
  bool packs_linears_ = false;  // the base: then those that it keeps plain stay plain
  const WeightedAdapter* adapter_ = nullptr;
  std::map<std::string, MergedWeight> weights_;
  std::map<std::string, const Adapter*> replaced_by_;
  bool made_head_ = false, keeps_tie_ = false, trained_tokens_ = false;
  MergePlan plan_;
};

}  // namespace monograph
