// The shared memory of a block, with what has happened to each byte of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "monograph/gpu/host/fault.h"

namespace monograph::gpu::host {

// Static shared memory of every GPU: more has to be asked for at the launch.
inline constexpr std::size_t kSharedBytes = 48 << 10;

class SharedMemory {
 public:
  SharedMemory();

  // A new block: nobody has written anything. The bytes are those of a NaN in every float type.
  void begin_block();
  // Behind a barrier what was written before it may be read by all.
  void pass_barrier() { ++interval_; }

  // The kernel's one object of `bytes` bytes; all threads ask for the same.
  std::byte* object(std::size_t bytes);
  // The object and what lies right beside it: an address there was meant for it.
  bool owns(const void* p) const;

  void check_read(const void* p, std::size_t bytes, unsigned thread);
  void check_write(const void* p, std::size_t bytes, unsigned thread);
  // An asynchronous copy takes the bytes over, and gives them back when it has arrived.
  void begin_copy(const void* p, std::size_t bytes, unsigned thread);
  void end_copy(const void* p, std::size_t bytes, unsigned thread);

 private:
  static constexpr std::size_t kGuard = 4096, kAlignment = 128;
  static constexpr std::uint32_t kSeveral = 0xffffffff;
  struct ByteState {
    std::uint32_t written = 0, read = 0;  // interval of the last; 0 for never
    std::uint32_t writer = 0, reader = 0;
    bool copied = false;  // a copy is on its way
  };
  ByteState* states_of(const void* p, std::size_t bytes);
  std::string place(const ByteState* state) const;

  std::unique_ptr<std::byte[]> bytes_;
  std::vector<ByteState> states_;
  std::byte* begin_;
  std::size_t size_ = 0;
  std::uint32_t interval_ = 0, first_interval_ = 1;
};

}  // namespace monograph::gpu::host
