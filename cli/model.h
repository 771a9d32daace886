// A checkpoint as subcommands open it: the files, their weights, and config.json next to them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "monograph/safetensors/checkpoint.h"
#include "monograph/text/json_document.h"
#include "monograph/weights/weight.h"

namespace monograph::cli {

struct Model {
  std::filesystem::path folder;  // of the files
  safetensors::Checkpoint checkpoint;
  std::optional<json::Value> config;  // config.json of the folder
  std::vector<Weight> weights;        // sorted by name

  std::uint64_t size_bytes() const;  // of all tensors
};

// `path` as for Checkpoint::open. Throws Error or IoError.
Model open_model(const std::filesystem::path& path, std::string_view stem = "model");

// As refuse_transforms of monograph/quant_methods/transforms.h.
void refuse_transforms(const Model& model);

// A small JSON file that must be an object.
json::Value read_json(const std::filesystem::path& path, const json::Limits& limits = {});

// A name from a file, safe for a terminal: as it is if it is printable ASCII, else escaped and in
// quotes; at most 120 characters.
std::string printable(std::string_view name);

// "4096 x 1024"; "-" for a scalar.
std::string shape_text(const std::vector<std::uint64_t>& shape);
// "8.03 G", "512".
std::string count_text(std::uint64_t count);
// A number with this many digits after the point.
std::string fixed_text(double value, int digits);

}  // namespace monograph::cli
