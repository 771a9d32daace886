// One safetensors file, mapped: tensors are views of the page cache, nothing is copied.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

#include "monograph/safetensors/file_ops.h"
#include "monograph/safetensors/header.h"

namespace monograph::safetensors {

// A regular file, mapped read-only and private. The length is that of the open file, taken before
// mapping. A file that another process shortens later still raises SIGBUS when read: replace
// checkpoints by renaming, as AtomicFile does, never in place.
class MappedFile {
 public:
  // Throws IoError if it cannot be opened, Error if it is not a regular file or longer than
  // `max_bytes`. Never blocks on a pipe.
  explicit MappedFile(const std::filesystem::path& path, std::uint64_t max_bytes = UINT64_MAX);
  // The same of a path that was resolved and checked: a link that took its place since is refused.
  // Messages show the name it had.
  MappedFile(const std::filesystem::path& resolved, const std::filesystem::path& shown,
             std::uint64_t max_bytes = UINT64_MAX);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  std::span<const std::uint8_t> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }
  FileId id() const { return id_; }

 private:
  void map(int fd, const std::filesystem::path& shown, std::uint64_t max_bytes);

  const std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
  FileId id_;
};

class Reader {
 public:
  // Maps the file and holds its header to every rule. Throws Error or IoError.
  explicit Reader(const std::filesystem::path& path);
  // The same of a path that was resolved and checked; path() is the name it had.
  Reader(const std::filesystem::path& resolved, std::filesystem::path shown);

  const std::filesystem::path& path() const { return path_; }
  const Header& header() const { return header_; }
  FileId id() const { return file_.id(); }
  const TensorEntry* find(std::string_view name) const { return header_.find(name); }
  // The bytes of an entry of this reader's header; valid while the reader lives. They lie at any
  // alignment: the format pads the header, but not every writer does.
  std::span<const std::uint8_t> bytes(const TensorEntry& entry) const {
    return file_.bytes().subspan(entry.offset_bytes, entry.size_bytes);
  }

 private:
  std::filesystem::path path_;
  MappedFile file_;
  Header header_;
};

}  // namespace monograph::safetensors
