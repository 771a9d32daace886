#include "monograph/safetensors/plan.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "monograph/base/error.h"
#include "monograph/safetensors/checked_size.h"
#include "monograph/text/utf8.h"

namespace monograph::safetensors {
namespace {

using text::append_json_string;
using text::in_quotes;

constexpr std::string_view kSource = "new header";

void append_metadata(std::string& out, const Metadata& metadata) {
  append_json_string(out, kMetadataKey);
  out += ":{";
  bool first = true;
  for (const auto& [key, value] : metadata) {
    if (!std::exchange(first, false)) out += ',';
    append_json_string(out, key);
    out += ':';
    append_json_string(out, value);
  }
  out += '}';
}

void append_entry(std::string& out, const TensorSpec& spec, std::uint64_t begin,
                  std::uint64_t end) {
  append_json_string(out, spec.name);
  out += ":{\"dtype\":\"";
  out += name_of(spec.dtype);
  out += "\",\"shape\":[";
  for (std::size_t i = 0; i < spec.shape.size(); ++i) {
    if (i != 0) out += ',';
    out += std::to_string(spec.shape[i]);
  }
  out += "],\"data_offsets\":[" + std::to_string(begin) + ',' + std::to_string(end) + "]}";
}

std::string shard_name(std::string_view stem, std::size_t number, std::size_t count) {
  char text[64];
  std::snprintf(text, sizeof text, "-%05zu-of-%05zu", number, count);
  return std::string(stem) + (count == 1 ? "" : text) + ".safetensors";
}

}  // namespace

std::uint64_t size_bytes(const TensorSpec& spec) {
  std::optional<std::uint64_t> bits = bits_of(spec.dtype);
  for (const std::uint64_t dimension : spec.shape) {
    if (bits) bits = checked_mul(*bits, dimension);
  }
  if (!bits || *bits % 8 != 0) {
    throw Error("tensor " + in_quotes(spec.name) + ": shape times dtype " +
                (bits ? "is not a whole number of bytes" : "overflows 64 bits"));
  }
  return *bits / 8;
}

FilePlan plan_file(std::vector<TensorSpec> tensors, const Metadata& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorSpec& a, const TensorSpec& b) {
    return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
  });
  std::string json = "{";
  if (!metadata.empty()) append_metadata(json, metadata);
  std::uint64_t end = 0;
  for (const TensorSpec& spec : tensors) {
    if (spec.name == kMetadataKey) {
      throw Error("tensor '__metadata__': the name is reserved for the metadata");
    }
    const std::optional<std::uint64_t> next = checked_add(end, size_bytes(spec));
    if (!next) throw Error("tensor " + in_quotes(spec.name) + ": the file would exceed 64 bits");
    if (json.size() > 1) json += ',';
    append_entry(json, spec, end, *next);
    end = *next;
  }
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');

  FilePlan plan;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    plan.prefix += static_cast<char>(static_cast<std::uint64_t>(json.size()) >> (8 * i) & 0xff);
  }
  plan.prefix += json;
  const std::optional<std::uint64_t> total = checked_add(plan.prefix.size(), end);
  // A file offset is signed.
  if (!total || *total > INT64_MAX) throw Error("a file of 2^63 bytes or more cannot be written");
  plan.size_bytes = *total;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(plan.prefix.data());
  plan.header = parse_header({bytes, plan.prefix.size()}, plan.size_bytes, kSource);
  return plan;
}

std::vector<FilePlan> plan_shards(std::vector<TensorSpec> tensors, const Metadata& metadata,
                                  std::uint64_t max_shard_bytes, std::string_view stem) {
  std::vector<std::vector<TensorSpec>> groups(1);
  std::uint64_t filled = 0;
  for (TensorSpec& spec : tensors) {
    const std::uint64_t size = size_bytes(spec);
    const std::optional<std::uint64_t> together = checked_add(filled, size);
    const bool fits = together && *together <= max_shard_bytes;
    if (!fits && !groups.back().empty()) {
      groups.emplace_back();
      filled = 0;
    }
    filled += size;
    groups.back().push_back(std::move(spec));
  }
  std::vector<FilePlan> plans;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    plans.push_back(plan_file(std::move(groups[i]), metadata));
    plans.back().file_name = shard_name(stem, i + 1, groups.size());
  }
  return plans;
}

std::string index_text(std::span<const FilePlan> shards) {
  std::map<std::string_view, std::string_view> weight_map;
  std::uint64_t total = 0;
  for (const FilePlan& plan : shards) {
    for (const TensorEntry& entry : plan.header.tensors) {
      if (!weight_map.emplace(entry.name, plan.file_name).second) {
        throw Error("tensor " + in_quotes(entry.name) + ": is in two shards");
      }
      total += entry.size_bytes;
    }
  }
  std::string text = "{\n  \"metadata\": {\n    \"total_size\": " + std::to_string(total) +
                     "\n  },\n  \"weight_map\": {";
  const char* separator = "\n    ";
  for (const auto& [tensor, file] : weight_map) {
    text += std::exchange(separator, ",\n    ");
    append_json_string(text, tensor);
    text += ": ";
    append_json_string(text, file);
  }
  return text + "\n  }\n}\n";
}

}  // namespace monograph::safetensors
