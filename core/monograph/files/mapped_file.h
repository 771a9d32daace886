// A file as bytes in memory, read by the page cache when they are touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

#include "monograph/files/file_ops.h"

namespace monograph::files {

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

}  // namespace monograph::files
