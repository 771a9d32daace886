// What inspect, verify and dequantize do with a GGUF file instead of a folder.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "command.h"
#include "convert_folder.h"
#include "monograph/base/dtype.h"

namespace monograph::cli {

// By its ending, or by its first bytes: Ollama keeps them under a hash.
bool is_gguf(const std::filesystem::path& path);

struct GgufInspection {
  std::vector<std::string> names;  // regexes
  bool json = false, markdown = false, no_tensors = false;
};
int inspect_gguf(const std::string& path, const GgufInspection& options, const Session& session);

// The header's rules, then every value: NaN and infinities are findings.
int verify_gguf(const std::string& path, int jobs, bool scan, bool json, const Session& session);

// Its weights as a folder of safetensors under transformers' names.
int dequantize_gguf(const FolderOptions& folder, DType dtype, const Session& session);

}  // namespace monograph::cli
