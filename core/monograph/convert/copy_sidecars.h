// The files of a model folder next to its weights: tokenizer, chat template, generation config,
// licence, code.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "monograph/files/file_ops.h"

namespace monograph {

enum class Sidecars : std::uint8_t { kAll, kTokenizer, kAllButTokenizer };

// Copies the files of `from` to `to`, synced, and returns their names, sorted. Left behind:
//   weights and their indexes in any format (.safetensors .bin .pt .pth .ckpt .h5 .msgpack .gguf
//   .onnx, *.index.json), adapters (adapter_*), quantiser settings (quantize_config.json,
//   hf_quant_config.json), config.json and README.md (they change with the weights and are the
//   caller's to write), manifests (*.manifest.json), hidden files, and folders other than
//   additional_chat_templates.
// kTokenizer: of these the files of the tokenizer and chat templates alone, or all others.
// A file that exists in `to` is kept. Throws Error if a symbolic link leaves `from` (see
// resolve_inside) or a file is longer than 1 GiB.
std::vector<std::string> copy_sidecars(const std::filesystem::path& from,
                                       const std::filesystem::path& to,
                                       Sidecars which = Sidecars::kAll,
                                       files::FileOps& ops = files::system_file_ops());

// Whether copy_sidecars copies a file of this name, if all are wanted.
bool is_sidecar(const std::string& name);

}  // namespace monograph
