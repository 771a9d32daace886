#include "monograph/kernels/experts/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#include "monograph/cpu/scratch.h"

namespace monograph {
namespace {

constexpr std::size_t kLine = 64, kHugePage = std::size_t{2} << 20;

struct Block {
  std::byte* data;
  std::size_t size;
};

class Kept {
 public:
  Kept() = default;
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    for (const Block& block : blocks_) std::free(block.data);
  }

  // The smallest that holds `size` and wastes at most as much again; nothing if there is none.
  Block take(std::size_t size) {
    auto best = blocks_.end();
    for (auto block = blocks_.begin(); block != blocks_.end(); ++block)
      if (block->size >= size && block->size <= 2 * size &&
          (best == blocks_.end() || block->size < best->size))
        best = block;
    if (best == blocks_.end()) {
      make_room(size);
      return {nullptr, 0};
    }
    const Block found = *best;
    bytes_ -= found.size;
    blocks_.erase(best);
    return found;
  }

  void hold(std::size_t size) { held_ += size; }

  void give(Block block) {
    held_ -= block.size;
    make_room(block.size);
    if (held_ + block.size > Buffer::kKeptBytes) return std::free(block.data);
    blocks_.push_back(block);
    bytes_ += block.size;
  }

 private:
  // For `size` bytes more: what was given back longest ago goes first.
  void make_room(std::size_t size) {
    while (!blocks_.empty() && held_ + bytes_ + size > Buffer::kKeptBytes) {
      std::free(blocks_.front().data);
      bytes_ -= blocks_.front().size;
      blocks_.erase(blocks_.begin());
    }
  }

  std::vector<Block> blocks_;
  std::size_t bytes_ = 0;  // of them
  std::size_t held_ = 0;   // by buffers of the thread
};

Kept& kept() {
  thread_local Kept blocks;
  return blocks;
}

}  // namespace

Buffer::Buffer(std::size_t bytes) {
  const std::size_t unit = bytes >= Scratch::kHugeBytes ? kHugePage : kLine;
  size_ = (std::max<std::size_t>(bytes, 1) + unit - 1) / unit * unit;
  const Block block = kept().take(size_);
  if (block.data != nullptr) {
    data_ = block.data;
    size_ = block.size;
    kept().hold(size_);
    return;
  }
  data_ = static_cast<std::byte*>(std::aligned_alloc(unit, size_));
  if (data_ == nullptr) throw std::bad_alloc();
  kept().hold(size_);
  if (unit == kHugePage) madvise(data_, size_, MADV_HUGEPAGE);
}

Buffer::~Buffer() {
  if (data_ != nullptr) kept().give({data_, size_});
}

void prefer_huge_pages(void* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t last = (begin + bytes) / kHugePage * kHugePage;
  if (first < last)
    madvise(static_cast<std::byte*>(data) + (first - begin), last - first, MADV_HUGEPAGE);
}

}  // namespace monograph
