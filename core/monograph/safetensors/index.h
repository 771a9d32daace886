// model.safetensors.index.json: which file of a sharded checkpoint holds which tensor. Knows bytes
// and names, not files.
//   {"metadata": {"total_size": 123}, "weight_map": {"tensor": "model-00001-of-00002.safetensors"}}
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace monograph::safetensors {

inline constexpr std::uint64_t kMaxIndexBytes = 100'000'000;

struct IndexEntry {
  std::string tensor;
  std::uint32_t shard = 0;  // into Index::shards
};

struct Index {
  std::vector<std::string> shards;  // sorted, each once; relative paths that stay in the folder
  std::vector<IndexEntry> tensors;  // sorted by name, each once
  // As the file says, if it says a whole number. Not enforced: tools count tied tensors in
  // different ways, and some wrote a float.
  std::optional<std::uint64_t> total_size_bytes;

  const IndexEntry* find(std::string_view tensor) const;  // nullptr if there is none
};

// Throws Error unless `json` is an object with a non-empty weight_map of strings without duplicate
// keys, where each file name passes check_shard_name. Other keys are skipped, at most 32 deep.
Index parse_index(std::string_view json, std::string_view source);

// Throws Error unless `shard` is a relative path below the folder on every operating system: parts
// between '/' that are not empty, '.' or '..'; no backslash, colon or control character; and the
// extension .safetensors, so that an index cannot have a pickle opened in its name.
void check_shard_name(std::string_view shard, std::string_view source);

}  // namespace monograph::safetensors
