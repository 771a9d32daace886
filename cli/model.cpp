#include "model.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "monograph/base/error.h"
#include "monograph/files/mapped_file.h"
#include "monograph/quant_methods/list_weights.h"
#include "monograph/quant_methods/transforms.h"
#include "monograph/text/utf8.h"
#include "session.h"

namespace monograph::cli {

namespace fs = std::filesystem;

json::Value read_json(const fs::path& path, const json::Limits& limits) {
  const files::MappedFile file(path, limits.bytes);
  json::Value value = json::parse(file.text(), path.string(), limits);
  if (!value.is(json::Kind::kObject)) throw Error(path.string() + ": must be a JSON object");
  return value;
}

Model open_model(const fs::path& path, std::string_view stem) {
  Model model;
  std::error_code ignored;
  model.folder = fs::is_directory(path, ignored) ? path : path.parent_path();
  const auto holds = [&](const std::string& name) { return fs::exists(path / name, ignored); };
  const std::string weights = std::string(stem) + ".safetensors";
  if (path.extension() == ".gguf" && fs::is_regular_file(path, ignored)) {
    throw Error(path.string() +
                ": is a GGUF file, wanted safetensors; monograph dequantize makes a folder of it");
  }
  if (stem == "model" && holds("adapter_config.json") && !holds(weights) &&
      !holds(weights + ".index.json")) {
    throw Error(path.string() +
                ": this is an adapter; merge it into its base first: monograph merge BASE "
                "--adapter " +
                path.string() + " --out MERGED");
  }
  model.checkpoint = safetensors::Checkpoint::open(path, stem);
  const fs::path config = model.folder / "config.json";
  if (fs::exists(config, ignored)) model.config = read_json(config);
  model.weights = list_weights(model.checkpoint, model.config ? &*model.config : nullptr);
  return model;
}

void refuse_transforms(const Model& model) {
  monograph::refuse_transforms(model.config ? &*model.config : nullptr, model.folder.string());
}

std::uint64_t Model::size_bytes() const {
  std::uint64_t total = 0;
  for (const Weight& weight : weights) total += weight.size_bytes;
  return total;
}

std::string printable(std::string_view name) {
  constexpr std::size_t kLongest = 120;
  const bool plain =
      std::all_of(name.begin(), name.end(), [](char c) { return c > 0x20 && c < 0x7f; });
  if (plain && name.size() <= kLongest) return std::string(name);
  return text::in_quotes(name);
}

std::string shape_text(const std::vector<std::uint64_t>& shape) {
  std::string text;
  for (const std::uint64_t dimension : shape) {
    text += (text.empty() ? "" : " x ") + std::to_string(dimension);
  }
  return text.empty() ? "-" : text;
}

std::string count_text(std::uint64_t count) {
  std::string text = bytes_text(count);
  // The same digits and letters, without the B of bytes and with an upper-case K.
  text.pop_back();
  if (text.ends_with(" ")) text.pop_back();
  if (text.ends_with("k")) text.back() = 'K';
  return text;
}

std::string fixed_text(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

}  // namespace monograph::cli
