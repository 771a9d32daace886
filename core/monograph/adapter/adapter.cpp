#include "monograph/adapter/adapter.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/files/mapped_file.h"
#include "monograph/safetensors/reader.h"
#include "monograph/text/json_scanner.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

namespace fs = std::filesystem;
using safetensors::LocatedTensor;
using safetensors::shape_text;
using safetensors::StoredDType;
using safetensors::TensorEntry;
using text::in_quotes;

constexpr std::string_view kPrefix = "base_model.model.";
constexpr const char* kRecordFile = "monograph.json";
constexpr std::uint64_t kMaxRecordBytes = 100'000;

bool remove_suffix(std::string& text, std::string_view suffix) {
  if (!text.ends_with(suffix)) return false;
  text.resize(text.size() - suffix.size());
  return true;
}

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

struct Role {
  std::string_view suffix;
  const TensorEntry* LowRank::*entry;
  const std::uint8_t* LowRank::*bytes;
  bool embedding;
};

constexpr Role kRoles[] = {
    {".lora_A.weight", &LowRank::a, &LowRank::a_bytes, false},
    {".lora_B.weight", &LowRank::b, &LowRank::b_bytes, false},
    {".lora_embedding_A", &LowRank::a, &LowRank::a_bytes, true},
    {".lora_embedding_B", &LowRank::b, &LowRank::b_bytes, true},
    {".lora_magnitude_vector", &LowRank::magnitude, &LowRank::magnitude_bytes, false},
    {".lora_B.bias", &LowRank::bias, &LowRank::bias_bytes, false},
};

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
  adapter.read_recorded_base();
  return adapter;
}

void Adapter::assign(const LocatedTensor& tensor) {
  const std::string& full = tensor.entry->name;
  if (!full.starts_with(kPrefix)) fail(full, "its name must begin with base_model.model.");
  if (full.find(".lora_start_") != std::string::npos) {
    fail(full,
         "the adapter has changed its packed base, but init_lora_weights of its config is not "
         "monograph_residual; merge_and_unload in Python merges it once that is set again");
  }
  if (!is_float(tensor.entry->dtype)) {
    fail(full, "is " + std::string(name_of(tensor.entry->dtype)) + ", must be F32, BF16 or F16");
  }
  std::string name = full.substr(kPrefix.size());
  for (const Role& role : kRoles) {
    std::string module = name;
    if (!remove_suffix(module, role.suffix)) continue;
    LowRank& lora = low_rank_[module];
    if (lora.*role.entry != nullptr) fail(full, "its role is taken by another tensor");
    lora.*role.entry = tensor.entry;
    lora.*role.bytes = tensor.bytes().data();
    lora.embedding = lora.embedding || role.embedding;
    return;
  }
  if (remove_suffix(name, ".token_adapter.trainable_tokens_delta")) {
    return assign_tokens(name, tensor);
  }
  if (name.find("lora_") != std::string::npos || name.find("token_adapter.") != std::string::npos) {
    fail(full, "this kind of tensor is not known");
  }
  remove_part(name, ".base_layer") || remove_part(name, ".modules_to_save");
  if (!replacements_.emplace(name, tensor).second) {
    fail(full, "two tensors take the place of " + in_quotes(name));
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

void Adapter::read_recorded_base() {
  const fs::path record = folder_ / kRecordFile;
  std::error_code ignored;
  if (fs::exists(record, ignored)) {
    recorded_base_ =
        parse_recorded_base(files::MappedFile(record, kMaxRecordBytes).text(), record.string());
  }
  for (const safetensors::Reader& file : checkpoint_.files()) {
    const safetensors::Metadata& metadata = file.header().metadata;
    const auto take = [&](const char* key, std::string& value) {
      const auto found = metadata.find(key);
      if (found == metadata.end()) return;
      if (!value.empty() && value != found->second) {
        throw Error(file.path().string() + ": metadata " + key + " is " + in_quotes(found->second) +
                    ", elsewhere the adapter says " + in_quotes(value));
      }
      value = found->second;
    };
    take("monograph.base_sha256", recorded_base_.sha256);
    take("monograph.base_weights", recorded_base_.weights);
  }
}

RecordedBase parse_recorded_base(std::string_view json, std::string_view source) {
  text::JsonScanner scanner(json, source);
  RecordedBase base;
  const auto text_to = [&](std::string& value) {
    if (scanner.peek() != '"') scanner.fail("sha256, weights, format and rule must be strings");
    if (!value.empty()) scanner.fail("duplicate key");
    value = scanner.string();
  };
  const auto read_packing = [&] {
    if (base.packed) scanner.fail("duplicate key");
    RecordedPacking& packed = base.packed.emplace();
    scanner.object([&](std::string_view key) {
      if (key == "format") return text_to(packed.format);
      if (key == "rule") return text_to(packed.rule);
      if (key == "values_sha256") return text_to(packed.values_sha256);
      if (key == "experts_sha256") return text_to(packed.experts_sha256);
      if (key == "block") {
        packed.block = scanner.unsigned_integer();
      } else if (key == "double_quant") {
        packed.double_quant = scanner.accept_word("true");
        if (!packed.double_quant && !scanner.accept_word("false")) {
          scanner.fail("double_quant must be true or false");
        }
      } else if (key == "experts") {
        packed.experts = scanner.accept_word("true");
        if (!*packed.experts && !scanner.accept_word("false")) {
          scanner.fail("experts must be true or false");
        }
      } else {
        scanner.skip_value(32);
      }
    });
  };
  scanner.object([&](std::string_view key) {
    if (key == "schema_version" && scanner.unsigned_integer() != 1) {
      scanner.fail("schema_version must be 1");
    }
    if (key == "schema_version") return;
    if (key != "base") return scanner.skip_value(32);
    scanner.object([&](std::string_view inner) {
      if (inner == "sha256") return text_to(base.sha256);
      if (inner == "weights") return text_to(base.weights);
      if (inner == "packed") return read_packing();
      scanner.skip_value(32);
    });
  });
  scanner.expect_end();
  const auto is_hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (!base.sha256.empty() &&
      (base.sha256.size() != 64 || !std::all_of(base.sha256.begin(), base.sha256.end(), is_hex))) {
    throw Error(std::string(source) + ": sha256 is " + in_quotes(base.sha256) +
                ", must be 64 hexadecimal digits");
  }
  if (!base.weights.empty() && base.weights != "original" && base.weights != "dequantized") {
    throw Error(std::string(source) + ": weights is " + in_quotes(base.weights) +
                ", must be original or dequantized");
  }
  return base;
}

}  // namespace monograph
