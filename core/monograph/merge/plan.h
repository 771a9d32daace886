// What a merge will do, decided before a byte is written: each weight of the output, where its
// value comes from and what changes it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "monograph/adapter/adapter.h"
#include "monograph/base/dtype.h"
#include "monograph/convert/convert.h"
#include "monograph/safetensors/plan.h"
#include "monograph/text/json_document.h"
#include "monograph/weights/weight.h"

namespace monograph {

struct WeightedAdapter {
  const Adapter* adapter = nullptr;
  double weight = 1;
};

// One LoRA on one weight: factor * B * A, where factor is its scale times the adapter's weight.
struct LowRankChange {
  const LowRank* lora = nullptr;
  double factor = 0;
  bool transposed = false;  // the weight is [inputs, outputs]: embeddings and fan_in_fan_out
};

struct BiasChange {
  const LowRank* lora = nullptr;
  double factor = 0;
};

struct MergedWeight {
  std::string name;
  std::vector<std::uint64_t> shape;
  const Weight* base = nullptr;  // what changes are measured from
  // Set: the base is quantised so and read back, as a model that was loaded in 4 bits sees it.
  std::optional<Conversion> base_as;
  // Takes the place of the base: modules_to_save and the like.
  const safetensors::LocatedTensor* replacement = nullptr;
  std::vector<LowRankChange> low_rank;  // a DoRA stands alone
  const TokenRows* tokens = nullptr;
  std::vector<BiasChange> biases;
  // What is stored: packed, a float type, or, if neither is set, the bytes of the base.
  std::optional<Conversion> packed;
  std::optional<DType> dtype;

  bool is_changed() const {
    return replacement != nullptr || !low_rank.empty() || tokens != nullptr || !biases.empty();
  }
  // "lora", "dora", "replaced", "tokens", "bias", or "" if nothing changes.
  std::string_view change() const;
  std::uint64_t elements() const { return base->elements; }
};

struct MergeSettings {
  std::optional<DType> dtype;  // of every float weight; none: each keeps that of the base
  // Of the weights of linear layers (see why_kept) and of those that are packed in the base.
  std::optional<Format> format;
  std::size_t block = 64;
  bool double_quant = false;
  // The format the base was loaded in for training, if it is not stored so: of the weights of
  // linear layers.
  std::optional<Format> base_as;
  std::size_t base_block = 64;
  bool base_double_quant = false;
};

struct MergePlan {
  std::vector<MergedWeight> weights;  // sorted by name
  bool unties_head = false;           // input embedding and head were one tensor and no longer are
  std::vector<std::string> notes;

  std::vector<safetensors::TensorSpec> specs() const;
};

// `weights` are those of the base; `config` is its config.json, or null. All must outlive the plan.
// Throws Error if a tensor of an adapter fits nothing in the base, a shape differs, or two adapters
// cannot act together (only LoRA adds up: DoRA, replaced modules and trained tokens stand alone,
// with weight 1), or an adapter changes a weight that is neither packed nor fp32, bf16 or fp16.
//
// A model whose head is its input embedding keeps one tensor only if the change was trained for
// both (trained tokens, ensure_weight_tying). Else the two are written apart, as the adapter was
// trained: the side it does not name keeps the values of the base.
MergePlan plan_merge(const std::vector<Weight>& weights, const json::Value& config,
                     std::span<const WeightedAdapter> adapters, const MergeSettings& settings);

// config.json of the output: quantization_config that of the output or none, dtype and
// tie_word_embeddings set where they changed.
json::Value merged_config(json::Value config, const MergePlan& plan, const MergeSettings& settings);

}  // namespace monograph
