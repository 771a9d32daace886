// The spill files of this process and what lies in them, by numbers that graphs can carry.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace monograph::ops {

// Thread safe. Every function throws Error for a number that it does not know. File 0 is the one
// that was opened last and is still open: what a compiled graph writes to. A forked child can read
// and drop what its parent has written, and write to files that it opens itself.
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
};

SpillRegistry spill_registry();

}  // namespace monograph::ops
