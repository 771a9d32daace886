#include "monograph/convert/copy_sidecars.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>
#include <system_error>

#include "monograph/files/atomic_file.h"
#include "monograph/files/inside_folder.h"
#include "monograph/files/list_folder.h"
#include "monograph/files/mapped_file.h"
#include "monograph/safetensors/reader.h"
#include "monograph/text/utf8.h"

namespace monograph {
namespace {

namespace fs = std::filesystem;
using files::IoError;

constexpr std::array<std::string_view, 15> kLeftExtensions = {
    ".safetensors",   ".bin",     ".pt",   ".pth", ".ckpt",   ".h5",
    ".msgpack",       ".gguf",    ".onnx", ".npz", ".tflite", ".index.json",
    ".manifest.json", ".partial", ".ot"};
constexpr std::array<std::string_view, 4> kLeftNames = {
    "config.json", "README.md", "quantize_config.json", "hf_quant_config.json"};
// As transformers saves tokenizers.
constexpr std::array<std::string_view, 12> kTokenizerNames = {"tokenizer.json",
                                                              "tokenizer_config.json",
                                                              "special_tokens_map.json",
                                                              "added_tokens.json",
                                                              "tokenizer.model",
                                                              "vocab.json",
                                                              "merges.txt",
                                                              "vocab.txt",
                                                              "chat_template.jinja",
                                                              "chat_template.json",
                                                              "spiece.model",
                                                              "sentencepiece.bpe.model"};
constexpr const char* kTemplates = "additional_chat_templates";
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 30;

bool is_of_tokenizer(const std::string& name) {
  return std::find(kTokenizerNames.begin(), kTokenizerNames.end(), name) != kTokenizerNames.end();
}

// `name` may be a path of two parts.
bool copy_file(const fs::path& from, const std::string& name, const fs::path& to,
               files::FileOps& ops) {
  const fs::path source =
      files::resolve_inside(from, name, from.string() + ": file " + text::in_quotes(name));
  if (!fs::is_regular_file(source) || fs::exists(to / name)) return false;
  const files::MappedFile file(source, from / name, kMaxBytes);
  files::write_file(to / name, file.text(), ops);
  return true;
}

}  // namespace

bool is_sidecar(const std::string& name) {
  if (name.starts_with('.') || name.starts_with("adapter_")) return false;
  if (std::find(kLeftNames.begin(), kLeftNames.end(), name) != kLeftNames.end()) return false;
  return std::none_of(kLeftExtensions.begin(), kLeftExtensions.end(),
                      [&](std::string_view extension) { return name.ends_with(extension); });
}

std::vector<std::string> copy_sidecars(const fs::path& from, const fs::path& to, Sidecars which,
                                       files::FileOps& ops) {
  std::error_code ignored;
  const fs::path folder = fs::canonical(from, ignored);
  if (ignored) throw IoError(from, "cannot be found", ignored.value());
  std::vector<std::string> copied;
  for (const std::string& name : files::list_folder(folder)) {
    const bool wanted =
        which == Sidecars::kAll || is_of_tokenizer(name) == (which == Sidecars::kTokenizer);
    if (wanted && is_sidecar(name) && copy_file(folder, name, to, ops)) copied.push_back(name);
  }
  if (which == Sidecars::kAllButTokenizer) return copied;
  if (!fs::is_directory(fs::symlink_status(folder / kTemplates, ignored))) return copied;
  if (ops.mkdir((to / kTemplates).c_str(), 0777) != 0 && errno != EEXIST) {
    throw IoError(to / kTemplates, "cannot make the folder", errno);
  }
  for (const std::string& name : files::list_folder(folder / kTemplates)) {
    const std::string path = std::string(kTemplates) + "/" + name;
    if (is_sidecar(name) && copy_file(folder, path, to, ops)) copied.push_back(path);
  }
  return copied;
}

}  // namespace monograph
