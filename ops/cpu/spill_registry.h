// The spill files of this process and what lies in them, by numbers that graphs can carry.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "monograph/files/spill_file.h"

namespace monograph::ops {

// Thread safe. Every function throws Error for a number that it does not know. File 0 is the one
// that was opened last and is still open: what a compiled graph writes to.
class SpillRegistry {
 public:
  std::int64_t open(const std::string& folder);
  // Takes the file's name away. Its disk space goes with the last ticket.
  void close(std::int64_t file);
  std::vector<std::int64_t> counts(std::int64_t file);

  // A ticket with one reference.
  std::int64_t write(std::int64_t file, std::span<const std::uint8_t> bytes);
  // Adds a reference, and the system may begin to read. Gives the size in bytes.
  std::int64_t begin(std::int64_t ticket);
  bool same(std::int64_t ticket, std::span<const std::uint8_t> bytes);
  void read(std::int64_t ticket, std::span<std::uint8_t> into);
  void drop(std::int64_t ticket) noexcept;

 private:
  struct File {
    std::unique_ptr<files::SpillFile> file;
    std::int64_t writes = 0, bytes_written = 0, reads = 0, bytes_read = 0, alive = 0,
                 bytes_alive = 0;
  };
  struct Kept {
    std::shared_ptr<File> file;
    files::SpillFile::Extent extent;
    int references = 1;
  };

  std::shared_ptr<File> find(std::int64_t file);

  std::mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<File>> files_;
  std::unordered_map<std::int64_t, Kept> kept_;
  std::int64_t next_file_ = 1, next_ticket_ = 1;
};

// Never destroyed: handles may outlive every static object.
SpillRegistry& spill_registry();

}  // namespace monograph::ops
