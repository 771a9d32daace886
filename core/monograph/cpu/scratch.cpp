#include "monograph/cpu/scratch.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace monograph {
namespace {

constexpr std::size_t kLine = 64, kHugePage = std::size_t{2} << 20;

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(memory_); }

  std::size_t size() const { return size_; }

  std::byte* reserve(std::size_t bytes) {
    if (bytes <= size_) return static_cast<std::byte*>(memory_);
    release();
    const std::size_t unit = bytes >= Scratch::kHugeBytes ? kHugePage : kLine;
    const std::size_t size = (bytes + unit - 1) / unit * unit;
    memory_ = std::aligned_alloc(unit, size);
    if (memory_ == nullptr) throw std::bad_alloc();
    if (unit == kHugePage) madvise(memory_, size, MADV_HUGEPAGE);  // a hint: small pages work too
    size_ = size;
    return static_cast<std::byte*>(memory_);
  }

  void release() {
    std::free(memory_);
    memory_ = nullptr;
    size_ = 0;
  }

 private:
  void* memory_ = nullptr;
  std::size_t size_ = 0;
};

Buffer& buffer_of(ScratchUse use) {
  thread_local Buffer buffers[kScratchUses];
  return buffers[static_cast<std::size_t>(use)];
}

}  // namespace

Scratch::Scratch(ScratchUse use, std::size_t bytes)
    : use_(use), data_(buffer_of(use).reserve(bytes)) {}

Scratch::~Scratch() {
  if (buffer_of(use_).size() > kKeptBytes) buffer_of(use_).release();
}

}  // namespace monograph
