#include "monograph/adapter/adapter.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "monograph/adapter/tensor_key.h"
#include "monograph/base/error.h"
#include "monograph/files/mapped_file.h"
#include "monograph/safetensors/reader.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

namespace fs = std::filesystem;
using safetensors::LocatedTensor;
using safetensors::shape_text;
using safetensors::StoredDType;
using safetensors::TensorEntry;
using text::in_quotes;

// "a.base_layer.weight" -> "a.weight"
bool remove_part(std::string& text, std::string_view part) {
  const std::size_t at = text.rfind(part);
  if (at == std::string::npos) return false;
  text.erase(at, part.size());
  return true;
}

bool is_float(StoredDType dtype) {
  return dtype == StoredDType::kF32 || dtype == StoredDType::kBF16 || dtype == StoredDType::kF16;
}

}  // namespace

safetensors::Checkpoint open_adapter_tensors(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(folder / "adapter_model.safetensors", ignored) &&
      fs::exists(folder / "adapter_model.bin", ignored)) {
    throw Error(folder.string() +
                ": has adapter_model.bin only, a pickle, which is never read; save the adapter "
                "again as safetensors (PEFT's default)");
  }
  return safetensors::Checkpoint::open(folder, "adapter_model");
}

void Adapter::fail(std::string_view tensor, const std::string& what) const {
  throw Error(folder_.string() + ": adapter tensor " + in_quotes(tensor) + ": " + what);
}

Adapter Adapter::open(const fs::path& folder) {
  Adapter adapter;
  adapter.folder_ = folder;
  const fs::path config = folder / "adapter_config.json";
  adapter.config_ = parse_adapter_config(files::MappedFile(config, kMaxAdapterConfigBytes).text(),
                                         config.string());
  adapter.checkpoint_ = open_adapter_tensors(folder);
  for (const LocatedTensor& tensor : adapter.checkpoint_.tensors()) adapter.assign(tensor);
  for (auto& [module, lora] : adapter.low_rank_) adapter.check_low_rank(module, lora);
  if (adapter.low_rank_.empty() && adapter.replacements_.empty() && adapter.token_rows_.empty()) {
    throw Error(folder.string() + ": the adapter holds no tensor");
  }
  if (adapter.token_rows_.size() != adapter.config_.trainable_tokens.size()) {
    throw Error(folder.string() + ": trainable_token_indices names " +
                std::to_string(adapter.config_.trainable_tokens.size()) + " modules, " +
                std::to_string(adapter.token_rows_.size()) + " have trainable_tokens_delta");
  }
  adapter.recorded_base_ = read_recorded_base(folder, adapter.checkpoint_);
  return adapter;
}

void Adapter::assign(const LocatedTensor& tensor) {
  const std::string& full = tensor.entry->name;
  const TensorKey key = parse_tensor_key(full);
  if (key.prefixes != 1) {
    fail(full, "its name must begin with " + std::string(kAdapterPrefix) + " once, and does " +
                   std::to_string(key.prefixes) + " times");
  }
  if (full.find(".lora_start_") != std::string::npos) {
    fail(full,
         "the adapter has changed its packed base, but init_lora_weights of its config is not "
         "monograph_residual; merge_and_unload in Python merges it once that is set again");
  }
  if (!is_float(tensor.entry->dtype)) {
    fail(full, "is " + std::string(name_of(tensor.entry->dtype)) + ", must be F32, BF16 or F16");
  }
  const auto take = [&](const TensorEntry* LowRank::*entry, const std::uint8_t* LowRank::*bytes) {
    LowRank& lora = low_rank_[key.module];
    if (lora.*entry != nullptr) fail(full, "its role is taken by another tensor");
    lora.*entry = tensor.entry;
    lora.*bytes = tensor.bytes().data();
    lora.embedding = lora.embedding || key.embedding;
  };
  if (!key.adapter_name.empty()) fail(full, "this kind of tensor is not known");
  switch (key.role) {
    case TensorRole::kA:
      return take(&LowRank::a, &LowRank::a_bytes);
    case TensorRole::kB:
      return take(&LowRank::b, &LowRank::b_bytes);
    case TensorRole::kMagnitude:
      return take(&LowRank::magnitude, &LowRank::magnitude_bytes);
    case TensorRole::kFactorBias:
      return take(&LowRank::bias, &LowRank::bias_bytes);
    case TensorRole::kTokens:
      return assign_tokens(key.module, tensor);
    case TensorRole::kUnknown:
      fail(full, "this kind of tensor is not known");
    case TensorRole::kBaseLayer:
      return replace(key.module + ".weight", tensor);
    case TensorRole::kReplaced:
      break;
  }
  std::string name = key.module;
  remove_part(name, ".base_layer") || remove_part(name, ".modules_to_save");
  replace(name, tensor);
}

void Adapter::replace(const std::string& name, const LocatedTensor& with) {
  if (!replacements_.emplace(name, with).second) {
    fail(with.entry->name, "two tensors take the place of " + in_quotes(name));
  }
}

void Adapter::assign_tokens(const std::string& module, const LocatedTensor& tensor) {
  const auto& all = config_.trainable_tokens;
  const auto rule = std::find_if(all.begin(), all.end(), [&](const TrainableTokens& tokens) {
    return tokens.module.empty() || module == tokens.module ||
           module.ends_with("." + tokens.module);
  });
  const std::string& full = tensor.entry->name;
  if (rule == all.end()) fail(full, "trainable_token_indices names no token for this module");
  if (tensor.entry->shape.size() != 2 || tensor.entry->shape[0] != rule->tokens.size()) {
    fail(full, "has shape " + shape_text(tensor.entry->shape) + " for " +
                   std::to_string(rule->tokens.size()) + " tokens");
  }
  token_rows_[module + ".weight"] = {tensor, rule->tokens};
}

void Adapter::check_low_rank(const std::string& module, LowRank& lora) const {
  if (lora.a == nullptr || lora.b == nullptr) {
    fail(module, std::string("has no lora_") + (lora.a == nullptr ? "A" : "B"));
  }
  const auto &a = lora.a->shape, &b = lora.b->shape;
  if (a.size() != 2 || b.size() != 2) {
    fail(module, "A has shape " + shape_text(a) + " and B " + shape_text(b) +
                     "; only linear layers and embeddings are supported");
  }
  lora.rank = config_.rank_of(module);
  const bool of_parameter = !config_.target_parameters.empty() && a[0] == b[1];
  if (!lora.has_rank() && !of_parameter) {
    fail(module, "A has shape " + shape_text(a) + " and B " + shape_text(b) +
                     ", but the config gives it rank " + std::to_string(lora.rank));
  }
  lora.scale = config_.scale_of(module);
  if ((lora.magnitude != nullptr) != config_.use_dora) {
    fail(module, config_.use_dora ? "use_dora is set, but there is no lora_magnitude_vector"
                                  : "has a lora_magnitude_vector, but use_dora is not set");
  }
  if (lora.magnitude != nullptr && lora.magnitude->elements != b[0]) {
    fail(module, "lora_magnitude_vector has shape " + shape_text(lora.magnitude->shape) +
                     ", must have " + std::to_string(b[0]) + " elements");
  }
  if (lora.bias != nullptr && !config_.lora_bias) {
    fail(module, "has a lora_B.bias, but lora_bias is not set");
  }
  if (lora.bias == nullptr && config_.lora_bias && !lora.embedding) {
    fail(module, "lora_bias is set, but there is no lora_B.bias");
  }
  if (lora.bias != nullptr && lora.bias->elements != b[0]) {
    fail(module, "lora_B.bias has shape " + shape_text(lora.bias->shape) + ", must have " +
                     std::to_string(b[0]) + " elements");
  }
}

}  // namespace monograph
