// Memory that belongs to a thread and is reused by its next call: two buffers that only grow, to a
// bound the driver keeps.
#pragma once

#include <cstddef>

namespace monograph {

// Aligned for tiles, and for huge pages where the system has them: with small pages the tiles of a
// panel miss the first-level TLB.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `bytes` bytes; what was there before is lost when it grows.
  std::byte* reserve(std::size_t bytes);

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Of the calling thread. `shared_scratch` is read by the threads that help with its call.
Scratch& shared_scratch();
Scratch& local_scratch();

}  // namespace monograph
