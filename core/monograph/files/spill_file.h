// A file that holds bytes which memory has no room for, until they are wanted again: one for a
// process, never read by another one.
//
// It has the name "monograph-spill-PID-NUMBER.bin" and is locked while its process lives. What a
// killed process left behind has no lock, and the next SpillFile in the same folder removes it.
// Space is reserved before it is written, so a full disk is an error of write() and never of
// somebody who reads. Reads compare a checksum (XXH3, 128 bits): bytes that were lost, cut off or
// changed are an error that names the file, never wrong numbers.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <span>
#include <string>

#include "monograph/files/file_ops.h"

namespace monograph::files {

class SpillFile {
 public:
  // Where bytes lie, and what they must be.
  struct Extent {
    std::uint64_t offset_bytes = 0, size_bytes = 0;
    std::array<std::uint64_t, 2> checksum{};
  };

  // In an existing folder. Throws IoError if it cannot be made there. `ops` must outlive the
  // object.
  explicit SpillFile(const std::filesystem::path& folder, FileOps& ops = system_file_ops());
  // Removes the file. A forked child leaves it to its parent.
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  // All functions are thread safe. Those that change the file throw Error in a forked child.
  Extent write(std::span<const std::uint8_t> bytes);
  // `into` has the size of the extent.
  void read(const Extent& extent, std::span<std::uint8_t> into) const;
  // Whether these are the bytes of an extent, by size and checksum.
  static bool is(const Extent& extent, std::span<const std::uint8_t> bytes);
  // The system may begin to read these bytes.
  void will_read(const Extent& extent) const;
  // Gives the space back. Nobody reads the extent any more.
  void release(const Extent& extent) noexcept;
  // Takes the name away now; what was written can be read as long as the object lives.
  void remove_name() noexcept;

  const std::filesystem::path& path() const { return path_; }

 private:
  void remove_leftovers(const std::filesystem::path& folder) const;
  bool create(const std::filesystem::path& candidate);
  std::uint64_t take(std::uint64_t size_bytes);
  void give_back(std::uint64_t offset_bytes, std::uint64_t size_bytes) noexcept;
  void check_owner() const;

  FileOps& ops_;
  std::filesystem::path path_;
  int fd_ = -1;
  int owner_ = 0;
  bool named_ = false;
  std::mutex mutex_;                             // of the two below
  std::map<std::uint64_t, std::uint64_t> free_;  // offset -> size; neighbours are joined
  std::uint64_t end_ = 0;                        // everything behind it is free
};

}  // namespace monograph::files
