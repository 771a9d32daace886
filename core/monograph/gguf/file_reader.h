// One GGUF file, mapped: tensors are views of the page cache, nothing is copied.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "monograph/base/function_ref.h"
#include "monograph/cpu/parallel.h"
#include "monograph/files/mapped_file.h"
#include "monograph/gguf/file_header.h"

namespace monograph::gguf {

class FileReader {
 public:
  // Maps the file and holds its header to every rule. Throws Error or IoError.
  explicit FileReader(const std::filesystem::path& path)
      : path_(path), file_(path), header_(parse_file_header(file_.bytes(), path_.string())) {}

  const std::filesystem::path& path() const { return path_; }
  const FileHeader& header() const { return header_; }
  files::FileId id() const { return file_.id(); }
  std::span<const std::uint8_t> all_bytes() const { return file_.bytes(); }
  // Blocks of a tensor of this reader's header, at multiples of 32 bytes or of its alignment.
  std::span<const std::uint8_t> bytes(const TensorInfo& tensor) const {
    return file_.bytes().subspan(header_.data_offset_bytes + tensor.offset_bytes,
                                 tensor.size_bytes);
  }

 private:
  std::filesystem::path path_;
  files::MappedFile file_;
  FileHeader header_;
};

// By its ending, or by its first bytes: Ollama keeps files under a hash.
bool is_gguf(const std::filesystem::path& path);

// Of the tensors, as checkpoint_sha256 hashes those of a folder (hash/checkpoint_hash.h); types by
// their names here, "q4_k". `done` is called with the bytes of each tensor, from any thread.
std::string file_sha256(const FileReader& file, ParallelFor parallel_for,
                        FunctionRef<void(std::uint64_t)> done);

}  // namespace monograph::gguf
