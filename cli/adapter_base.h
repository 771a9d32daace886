// The base of an adapter, as `adapter check` and `adapter convert` look at it: a folder, or the
// GGUF file that llama.cpp runs. Names, shapes and settings are those of transformers.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model.h"
#include "monograph/files/file_ops.h"
#include "monograph/gguf/file_reader.h"
#include "recorded_base.h"

namespace monograph::cli {

class AdapterBase {
 public:
  // Throws Error for a GGUF file and another server than llama.cpp, which alone runs it.
  AdapterBase(const std::filesystem::path& path, std::string_view server);

  const std::filesystem::path& folder() const { return model_.folder; }
  const std::vector<Weight>& weights() const { return model_.weights; }  // of a GGUF unreadable
  const json::Value& config() const { return config_; }
  std::vector<files::FileId> ids() const;
  // What another_base says of it.
  std::string differs(const std::string& adapter, const safetensors::Checkpoint& tensors,
                      const Session& session) const;

 private:
  void read_gguf();

  std::shared_ptr<const gguf::FileReader> file_;
  Model model_;  // without a checkpoint if there is a file
  json::Value config_;
};

}  // namespace monograph::cli
