#include "kernels/linear/scratch.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace monograph {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

Scratch::~Scratch() { std::free(data_); }

std::byte* Scratch::reserve(std::size_t bytes) {
  if (bytes <= size_) return data_;
  std::free(data_);
  data_ = nullptr;
  size_ = 0;
  const std::size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* memory = std::aligned_alloc(kHugePage, size);
  if (memory == nullptr) throw std::bad_alloc();
  madvise(memory, size, MADV_HUGEPAGE);  // a hint: small pages work too
  data_ = static_cast<std::byte*>(memory);
  size_ = size;
  return data_;
}

Scratch& shared_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

Scratch& local_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

}  // namespace monograph
