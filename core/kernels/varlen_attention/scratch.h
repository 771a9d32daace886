// Working memory of the calling thread, kept between calls: fresh pages cost more than the packing
// that fills them (0.25 us each).
#pragma once

#include <cstddef>
#include <cstdint>

namespace monograph {

// Memory of different uses may be held at the same time; of one use, once a thread.
enum class ScratchUse : std::uint8_t { kPacked, kThread, kSums };
inline constexpr std::size_t kScratchUses = 3;

// `bytes` bytes, 64-byte aligned, contents undefined. More than kKeptBytes are given back at the
// end.
class HeldScratch {
 public:
  static constexpr std::size_t kKeptBytes = std::size_t{32} << 20;

  HeldScratch(ScratchUse use, std::size_t bytes);
  ~HeldScratch();
  HeldScratch(const HeldScratch&) = delete;
  HeldScratch& operator=(const HeldScratch&) = delete;

  std::byte* data() const { return data_; }

 private:
  ScratchUse use_;
  std::byte* data_;
};

}  // namespace monograph
