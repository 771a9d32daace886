// The checksums of a checkpoint as a small JSON file.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "monograph/safetensors/checkpoint.h"

namespace monograph::cli {

struct Checksum {
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::string xxh3;  // XXH3, 128 bits, 32 hexadecimal digits as `xxhsum -H2` prints them
  friend bool operator==(const Checksum&, const Checksum&) = default;
};

// By tensor: the files they lie in do not matter.
using Manifest = std::map<std::string, Checksum>;

Manifest make_manifest(const safetensors::Checkpoint& checkpoint, int threads,
                       const std::function<void(std::uint64_t)>& advance);
std::string manifest_text(const Manifest& manifest);
// Throws Error if the file is no manifest.
Manifest read_manifest(const std::filesystem::path& path);
// One line for each tensor that differs, is missing or is new; safe for a terminal.
std::vector<std::string> compare(const Manifest& wanted, const Manifest& found);

}  // namespace monograph::cli
