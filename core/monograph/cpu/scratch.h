// Working memory of the calling thread, kept between calls: fresh pages cost more than writing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monograph {

// Buffers of different uses may be held at the same time; of one use, once per thread.
enum class ScratchUse : std::uint8_t {
  kShared,  // made by the calling thread, read by the threads that help with its call
  kLocal,   // of one thread's share of the work
  kSums,    // partial results of one thread
  kLogits,  // of the calling thread, around products that use the others
};
inline constexpr std::size_t kScratchUses = 4;

// `bytes` bytes, aligned to 64. Contents are undefined, but for what the thread's last holder of
// the same use left, if it asked for as many bytes or more. From kHugeBytes on they lie on huge
// pages where the system has them: with small pages the tiles of a panel miss the first-level TLB.
// More than kKeptBytes are given back at the end. Throws std::bad_alloc.
class Scratch {
 public:
  static constexpr std::size_t kHugeBytes = std::size_t{1} << 20;
  static constexpr std::size_t kKeptBytes = std::size_t{32} << 20;

  Scratch(ScratchUse use, std::size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::byte* data() const { return data_; }

 private:
  ScratchUse use_;
  std::byte* data_;
};

}  // namespace monograph
