#include "monograph/adapter/recorded_base.h"

#include <algorithm>
#include <map>
#include <system_error>

#include "monograph/base/error.h"
#include "monograph/files/mapped_file.h"
#include "monograph/hash/sha256.h"
#include "monograph/safetensors/reader.h"
#include "monograph/text/json_scanner.h"
#include "monograph/text/utf8.h"
#include "monograph/weights/experts.h"

namespace monograph {
namespace {

namespace fs = std::filesystem;
using text::in_quotes;

constexpr const char* kRecordFile = "monograph.json";
constexpr std::uint64_t kMaxRecordBytes = 100'000;

std::string sha256_of(const Weight& weight) {
  Sha256 hash;
  hash.add(weight.parts.front().tensor.bytes());
  return hash.hex();
}

bool is_of_experts(const Weight& weight) {
  return is_expert_stack(weight) || parse_expert_name(weight.name).has_value();
}

// RecordedPacking::values_sha256 of a base. Records are of the linear layers; `experts`: also of
// experts.
std::string packed_values_sha256(const std::vector<Weight>& weights, bool experts) {
  Sha256 all;
  for (const Weight& weight : weights) {
    if (!weight.is_packed() || (is_of_experts(weight) && !experts)) continue;
    all.add(json::quote(weight.name) + " " + sha256_of(weight) + "\n");
  }
  return all.hex();
}

// RecordedPacking::experts_sha256 of a base. Experts that are stored one by one count as the stack
// that they make.
std::string packed_experts_sha256(const std::vector<Weight>& weights, const json::Value& config) {
  std::map<std::string, std::string> lines;
  for (const Weight& stack : stack_experts(weights, config).stacks) {
    if (!stack.is_packed()) continue;
    Sha256 one;
    if (stack.composed) {
      for (const Weight& source : stack.composed->sources) {
        one.add(source.parts.front().tensor.bytes());
      }
    } else {
      one.add(stack.parts.front().tensor.bytes());
    }
    lines[std::string(layer_of(stack.name)) + "." + std::string(stack_parameter(stack.name))] =
        one.hex();
  }
  Sha256 all;
  for (const auto& [name, hash] : lines) all.add(json::quote(name) + " " + hash + "\n");
  return all.hex();
}

}  // namespace

bool is_recorded_base(const RecordedBase& recorded, const std::vector<Weight>& weights,
                      const json::Value* config, const std::string& sha256) {
  if (recorded.sha256.empty() || recorded.sha256 == sha256) return true;
  const bool packed = std::any_of(weights.begin(), weights.end(),
                                  [](const Weight& weight) { return weight.is_packed(); });
  if (!recorded.packed || !packed) return false;
  const RecordedPacking& trained = *recorded.packed;
  if (packed_values_sha256(weights, true) != trained.values_sha256 &&
      packed_values_sha256(weights, false) != trained.values_sha256) {
    return false;
  }
  return trained.experts_sha256.empty() ||
         (config != nullptr && packed_experts_sha256(weights, *config) == trained.experts_sha256);
}

RecordedBase read_recorded_base(const fs::path& folder, const safetensors::Checkpoint& adapter) {
  RecordedBase recorded;
  const fs::path record = folder / kRecordFile;
  std::error_code ignored;
  if (fs::exists(record, ignored)) {
    recorded =
        parse_recorded_base(files::MappedFile(record, kMaxRecordBytes).text(), record.string());
  }
  for (const safetensors::Reader& file : adapter.files()) {
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
    take("monograph.base_sha256", recorded.sha256);
    take("monograph.base_weights", recorded.weights);
  }
  return recorded;
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
