// All files of a checkpoint, opened together and checked against their index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "monograph/files/file_ops.h"
#include "monograph/safetensors/reader.h"

namespace monograph::safetensors {

struct LocatedTensor {
  const Reader* file = nullptr;
  const TensorEntry* entry = nullptr;

  std::span<const std::uint8_t> bytes() const { return file->bytes(*entry); }
};

class Checkpoint {
 public:
  // `path` is a .safetensors file, an index (*.index.json), or a folder that holds STEM.safetensors
  // or STEM.safetensors.index.json (both at once are an error: readers disagree which one counts).
  //
  // For an index, besides the rules of parse_index and parse_header: each shard exists, is inside
  // the folder after symbolic links are resolved, holds every tensor that the index places there,
  // and no other. One way out of the folder is allowed: into ../../blobs of a Hugging Face cache
  // (REPO/snapshots/REVISION), which consists of such links.
  static Checkpoint open(const std::filesystem::path& path, std::string_view stem = "model");

  const std::vector<Reader>& files() const { return files_; }
  // Sorted by name.
  const std::vector<LocatedTensor>& tensors() const { return tensors_; }
  const LocatedTensor* find(std::string_view name) const;  // nullptr if there is none
  // What a writer must not replace: for WriteOptions::inputs.
  std::vector<files::FileId> ids() const;

 private:
  void open_index(const std::filesystem::path& path);
  void list_tensors();

  std::vector<Reader> files_;
  std::vector<LocatedTensor> tensors_;
};

}  // namespace monograph::safetensors
