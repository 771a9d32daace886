// What a merge will do, decided before a byte is written: each weight of the output, where its
// value comes from and what changes it.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "monograph/adapter/adapter.h"
#include "monograph/base/dtype.h"
#include "monograph/convert/convert.h"
#include "monograph/merge/calibration.h"
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
  std::uint64_t rank = 0;
  // Of a parameter of experts: how many, and the one whose matrix the weight, or the first of its
  // matrices, is; its first row is this row of the parameter's matrix, the next is so many behind.
  std::uint64_t experts = 1, first_expert = 0, first_row = 0, row_step = 1;
};

struct BiasChange {
  const LowRank* lora = nullptr;
  double factor = 0;
};

// How merged values become codes of a packed format.
enum class Rounding : std::uint8_t {
  kNearest,
  // With error feedback along the directions of the LoRAs, see directions.h. Weights that no LoRA
  // changes are rounded to nearest.
  kAdapter,
  // Also along the inputs that training saw, with or without a LoRA. Weights of which no inputs are
  // known are rounded as by kAdapter.
  kCalibrated,
};

struct MergedWeight {
  std::string name;
  std::vector<std::uint64_t> shape;
  const Weight* base = nullptr;  // what changes are measured from
  // Of an embedding or a head: rows behind those of the base, which are zeros there.
  std::uint64_t new_rows = 0;
  // A stack of experts: how many matrices it has; 0 for any other weight.
  std::uint64_t experts = 0;
  bool inputs_first = false;  // of a stack: [experts, inputs, outputs]
  // Of a stack that is stored one by one: the tensors, each an equal share of its rows.
  std::vector<std::string> members;
  // Set: the base is quantised so and read back, as a model that was loaded in 4 bits sees it. Of a
  // stack with inputs_first, base_as->weight is the base with outputs for rows.
  std::optional<Conversion> base_as;
  // Takes the place of the base: modules_to_save and the like.
  const safetensors::LocatedTensor* replacement = nullptr;
  std::vector<LowRankChange> low_rank;  // a DoRA stands alone
  const TokenRows* tokens = nullptr;
  std::vector<BiasChange> biases;
  // What is stored: packed, a float type, or, if neither is set, the bytes of the base.
  std::optional<Conversion> packed;
  Rounding rounding = Rounding::kNearest;    // of packed ones
  const CalibratedInputs* inputs = nullptr;  // set for kCalibrated
  std::optional<DType> dtype;

  bool is_changed() const {
    return replacement != nullptr || !low_rank.empty() || tokens != nullptr || !biases.empty();
  }
  // "lora", "dora", "replaced", "tokens", "bias", or "" if nothing changes.
  std::string_view change() const;
  std::uint64_t elements() const {
    return base->elements + (new_rows == 0 ? 0 : new_rows * shape.back());
  }
};

// What becomes of experts in a packed output. Those that are packed in the base are packed anyway.
enum class ExpertsOutput : std::uint8_t { kKeep, kStack, kSeparate };

struct MergeSettings {
  std::optional<DType> dtype;  // of every float weight; none: each keeps that of the base
  // Of the weights of linear layers (see skip_reason) and of those that are packed in the base.
  std::optional<Format> format;
  std::size_t block = 64;  // of groups of a row also 0: the row
  ScaleRule rule = ScaleRule::kDefault;
  bool double_quant = false;
  Rounding rounding = Rounding::kNearest;
  const Calibration* calibration = nullptr;  // for kCalibrated; must outlive the plan
  // The format the base was loaded in for training, if it is not stored so: of the weights of
  // linear layers.
  std::optional<Format> base_as;
  std::size_t base_block = 64;
  ScaleRule base_rule = ScaleRule::kDefault;
  bool base_double_quant = false;
  bool base_as_experts = false;  // also of the experts
  ExpertsOutput experts = ExpertsOutput::kKeep;
  // LoRA of a parameter of experts changes the matrices of single experts, each a weight of the
  // plan: of a base that has gate and up apart.
  bool single_experts = false;
};

struct MergePlan {
  std::vector<MergedWeight> weights;  // sorted by name
  bool unties_head = false;           // input embedding and head were one tensor and no longer are
  // The adapter that trains rows of the embedding or the head, whose tokenizer may differ.
  const Adapter* trains_vocabulary = nullptr;
  std::uint64_t vocabulary = 0;  // rows of embedding and head if they are more than in the base
  // Packed weights that kCalibrated finds inputs of, and those it finds none of.
  std::size_t calibrated = 0, not_calibrated = 0;
  std::vector<std::string> notes;
  std::deque<Weight> views;  // what `weights` point to besides the weights of the base

  std::vector<safetensors::TensorSpec> specs() const;
};

// `weights` are those of the base; `config` is its config.json, or null. All must outlive the plan.
// Throws Error if a tensor of an adapter fits nothing in the base, a shape differs, or two adapters
// cannot act together (only LoRA adds up: DoRA, replaced modules and trained tokens stand alone,
// with weight 1), or an adapter changes a weight that is neither packed nor fp32, bf16 or fp16.
//
// A LoRA of a parameter of experts (target_parameters) is applied to the stack or to the matrices
// that the base stores; experts of a plain output stay as they are stored.
//
// A calibration that knows the inputs of no packed weight, or another number of them, is an Error.
//
// Replaced embeddings and heads, and trained tokens, may have more rows than the base: new tokens.
// All new rows must be the adapter's, of both embedding and head, and neither may be packed.
//
// A model whose head is its input embedding keeps one tensor only if the change was trained for
// both (trained tokens, ensure_weight_tying). Else the two are written apart, as the adapter was
// trained: the side it does not name keeps the values of the base.
MergePlan plan_merge(const std::vector<Weight>& weights, const json::Value& config,
                     std::span<const WeightedAdapter> adapters, const MergeSettings& settings);

// config.json of the output: quantization_config that of the output or none, dtype,
// tie_word_embeddings and vocab_size set where they changed.
json::Value merged_config(json::Value config, const MergePlan& plan, const MergeSettings& settings);

}  // namespace monograph
