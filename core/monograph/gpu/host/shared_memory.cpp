#include "monograph/gpu/host/shared_memory.h"

#include <cstring>
#include <string>

namespace monograph::gpu::host {
namespace {

std::string pair(unsigned one, std::uint32_t other) {
  return "thread " + std::to_string(one) +
         (other == 0xffffffff ? " and others" : " and thread " + std::to_string(other));
}

}  // namespace

std::string SharedMemory::place(const ByteState* state) const {
  return "byte " + std::to_string(state - states_.data());
}

SharedMemory::SharedMemory()
    : bytes_(new std::byte[kSharedBytes + 2 * kGuard + kAlignment]), states_(kSharedBytes) {
  void* first = bytes_.get() + kGuard;
  std::size_t room = kSharedBytes + kAlignment;
  begin_ = static_cast<std::byte*>(std::align(kAlignment, kSharedBytes, first, room));
}

void SharedMemory::begin_block() {
  first_interval_ = ++interval_;
  std::memset(begin_, 0xff, size_);
  for (std::size_t i = 0; i < size_; ++i) states_[i].copied = false;
}

std::byte* SharedMemory::object(std::size_t bytes) {
  if (bytes > kSharedBytes)
    throw KernelFault(
        FaultKind::kSharedOutOfBounds,
        std::to_string(bytes) + " bytes asked for, wanted at most " + std::to_string(kSharedBytes));
  if (size_ == 0) {
    size_ = bytes;
    std::memset(begin_, 0xff, size_);
  }
  if (size_ != bytes)
    throw KernelFault(FaultKind::kSharedOutOfBounds, "a second object of " + std::to_string(bytes) +
                                                         " bytes, the first has " +
                                                         std::to_string(size_));
  return begin_;
}

bool SharedMemory::owns(const void* p) const {
  const std::byte* at = static_cast<const std::byte*>(p);
  return at >= begin_ - kGuard && at < begin_ + kSharedBytes + kGuard;
}

SharedMemory::ByteState* SharedMemory::states_of(const void* p, std::size_t bytes) {
  const std::byte* at = static_cast<const std::byte*>(p);
  if (at < begin_ || at + bytes > begin_ + size_)
    throw KernelFault(FaultKind::kSharedOutOfBounds, "bytes from " + std::to_string(at - begin_) +
                                                         " on, " + std::to_string(bytes) +
                                                         " of them; the block has " +
                                                         std::to_string(size_));
  return states_.data() + (at - begin_);
}

void SharedMemory::check_read(const void* p, std::size_t bytes, unsigned thread) {
  ByteState* state = states_of(p, bytes);
  for (ByteState* end = state + bytes; state != end; ++state) {
    if (state->copied)
      throw KernelFault(FaultKind::kCopyNotWaitedFor,
                        place(state) + " is read by thread " + std::to_string(thread));
    if (state->written < first_interval_)
      throw KernelFault(FaultKind::kUninitialisedShared,
                        place(state) + " is read by thread " + std::to_string(thread));
    if (state->written == interval_ && state->writer != thread)
      throw KernelFault(FaultKind::kMissingBarrier,
                        place(state) + " is read and written by " + pair(thread, state->writer));
    state->reader = state->read == interval_ && state->reader != thread ? kSeveral : thread;
    state->read = interval_;
  }
}

void SharedMemory::check_write(const void* p, std::size_t bytes, unsigned thread) {
  ByteState* state = states_of(p, bytes);
  for (ByteState* end = state + bytes; state != end; ++state) {
    if (state->copied)
      throw KernelFault(FaultKind::kCopyNotWaitedFor,
                        place(state) + " is written by thread " + std::to_string(thread));
    if (state->read == interval_ && state->reader != thread)
      throw KernelFault(FaultKind::kMissingBarrier,
                        place(state) + " is written and read by " + pair(thread, state->reader));
    if (state->written == interval_ && state->writer != thread)
      throw KernelFault(FaultKind::kMissingBarrier,
                        place(state) + " is written by " + pair(thread, state->writer));
    state->writer = thread;
    state->written = interval_;
  }
}

void SharedMemory::begin_copy(const void* p, std::size_t bytes, unsigned thread) {
  check_write(p, bytes, thread);
  ByteState* state = states_of(p, bytes);
  for (ByteState* end = state + bytes; state != end; ++state) state->copied = true;
}

void SharedMemory::end_copy(const void* p, std::size_t bytes, unsigned thread) {
  ByteState* state = states_of(p, bytes);
  for (ByteState* end = state + bytes; state != end; ++state) state->copied = false;
  check_write(p, bytes, thread);
}

}  // namespace monograph::gpu::host
