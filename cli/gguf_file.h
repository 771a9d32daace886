// What inspect, verify, diff and dequantize do with a GGUF file instead of a folder.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "command.h"
#include "convert_folder.h"
#include "model.h"
#include "monograph/base/dtype.h"
#include "monograph/gguf/file_reader.h"
#include "monograph/gguf/tensor_weights.h"

namespace monograph::cli {

using gguf::is_gguf;

struct GgufInspection {
  std::vector<std::string> names;  // regexes
  bool json = false, markdown = false, no_tensors = false, hash = false;
};
int inspect_gguf(const std::string& path, const GgufInspection& options, const Session& session);

// The header's rules, then every value: NaN and infinities are findings.
int verify_gguf(const std::string& path, int jobs, bool scan, bool json, const Session& session);

// Says that a folder can be made of the file, if dequantize_gguf can.
void say_next_of_gguf(const gguf::FileReader& file, const Session& session);

// Its weights as a folder of safetensors under transformers' names.
int dequantize_gguf(const FolderOptions& folder, DType dtype, const Session& session);

// Its tensors as weights whose `source` is set, and config.json as far as transformers has one.
Model open_gguf_model(const std::filesystem::path& path, gguf::TensorNames names);

}  // namespace monograph::cli
