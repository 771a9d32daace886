#include "monograph/train/run_identity.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "monograph/base/error.h"
#include "monograph/cpu/isa.h"

namespace monograph::train {
namespace {

using json::Value;

constexpr const char* kInstructionSet = "instruction set";
// The rows of native_keys.py that are TOLD, and the kernels.
constexpr std::array<std::string_view, 11> kTold = {
    kInstructionSet, "attn_implementation", "pad_to_sequence_len", "num_epochs",   "max_steps",
    "learning_rate", "lr_scheduler",        "cosine_min_lr_ratio", "warmup_ratio", "warmup_steps",
    "step_mode"};

std::string shown(const Value* value) {
  return value == nullptr ? "missing" : json::dump_line(*value);
}

bool same(const Value& a, const Value& b) {
  // 12 and 12.0 are one number.
  if (a.is(json::Kind::kNumber) && b.is(json::Kind::kNumber)) return a.as_double() == b.as_double();
  return json::dump_line(a) == json::dump_line(b);
}

Value count(std::size_t n) { return Value::number(static_cast<std::int64_t>(n)); }

Value number_or_null(const std::optional<double>& value) {
  return value ? Value::number(*value) : Value();
}

}  // namespace

Value keys_of_run(const Recipe& recipe, const std::string& tokens_sha256,
                  const std::string& config_sha256) {
  Value keys = Value::object();
  keys.set("adapter", Value::string(recipe.packed_base ? "qlora" : "lora"));
  keys.set("seed", count(recipe.seed));
  keys.set("sequence_len", Value::number(recipe.sequence_len));
  keys.set("sample_packing", Value::boolean(recipe.sample_packing));
  keys.set("pad_to_sequence_len",
           recipe.pad_to_sequence_len ? Value::boolean(*recipe.pad_to_sequence_len) : Value());
  keys.set("shuffle_merged_datasets", Value::boolean(recipe.shuffle));
  keys.set("micro_batch_size", count(recipe.micro_batch_size));
  keys.set("gradient_accumulation_steps", count(recipe.gradient_accumulation_steps));
  keys.set("virtual_shards", count(recipe.leaves()));
  keys.set("num_epochs", Value::number(recipe.num_epochs));
  keys.set("max_steps", recipe.max_steps ? count(*recipe.max_steps) : Value());
  keys.set("learning_rate", Value::number(recipe.schedule.learning_rate));
  keys.set("lr_scheduler", Value::string(recipe.schedule.name));
  keys.set("cosine_min_lr_ratio", number_or_null(recipe.schedule.least));
  keys.set("warmup_ratio", number_or_null(recipe.schedule.warmup_ratio));
  keys.set("warmup_steps", number_or_null(recipe.schedule.warmup_steps));
  keys.set("weight_decay", Value::number(recipe.weight_decay));
  keys.set("adam_beta1", Value::number(recipe.adam_beta1));
  keys.set("adam_beta2", Value::number(recipe.adam_beta2));
  keys.set("adam_epsilon", Value::number(recipe.adam_epsilon));
  keys.set("max_grad_norm", Value::number(recipe.max_grad_norm));
  keys.set("lora_r", count(recipe.lora.rank));
  keys.set("lora_alpha", Value::number(recipe.lora.alpha));
  keys.set("lora_dropout", Value::number(recipe.dropout));
  keys.set("peft_use_rslora", Value::boolean(recipe.lora.rslora));
  keys.set("bf16", Value::boolean(recipe.dtype == DType::kBFloat16));
  keys.set("attn_implementation", Value::string(recipe.attention));
  keys.set("step_mode", Value::string(recipe.step_mode));
  keys.set(kInstructionSet, Value::string(name_of(best_isa())));
  keys.set("tokens of datasets", Value::string(tokens_sha256));
  keys.set("config.json of base_model", Value::string(config_sha256));
  return keys;
}

std::vector<std::string> compare_runs(const Value& state, const RunIdentity& own,
                                      const std::string& source) {
  const auto differs = [&](const std::string& name, const Value* saved, const Value& here) {
    throw Error("resume_from_checkpoint: " + name + " is " + shown(&here) + ", " + source +
                " has " + shown(saved) + "; wanted a checkpoint of this run");
  };
  const Value* const order = state.find("order");
  for (const json::Member& member : own.order.members()) {
    const Value* const saved = order == nullptr ? nullptr : order->find(member.key);
    const bool place = member.key == "epoch" || member.key == "step";
    if (!place && (saved == nullptr || !same(*saved, member.value)))
      differs(member.key, saved, member.value);
  }
  const Value base = Value::string(own.base_sha256);
  const Value* const saved_base = state.find("base_sha256");
  if (saved_base == nullptr || !same(*saved_base, base))
    differs("the base's hash", saved_base, base);
  std::vector<std::string> told;
  const Value* const keys = state.find("identity");
  for (const json::Member& member : own.keys.members()) {
    const Value* const saved = keys == nullptr ? nullptr : keys->find(member.key);
    if (saved == nullptr || same(*saved, member.value)) continue;
    if (std::find(kTold.begin(), kTold.end(), member.key) == kTold.end())
      differs(member.key, saved, member.value);
    told.push_back(
        member.key + " is " + shown(&member.value) + " from here on, was " + shown(saved) +
        (member.key == kInstructionSet ? ": the bits are not those of an unbroken run" : ""));
  }
  return told;
}

}  // namespace monograph::train
