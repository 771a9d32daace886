#include "kernels/varlen_attention/scratch.h"

#include <memory>
#include <new>

namespace monograph {
namespace {

constexpr std::align_val_t kAlignment{64};

struct Free {
  void operator()(std::byte* p) const { ::operator delete(p, kAlignment); }
};

struct Buffer {
  std::unique_ptr<std::byte, Free> memory;
  std::size_t bytes = 0;
};

thread_local Buffer buffers[kScratchUses];

}  // namespace

HeldScratch::HeldScratch(ScratchUse use, std::size_t bytes) : use_(use) {
  Buffer& buffer = buffers[static_cast<std::size_t>(use)];
  if (buffer.bytes < bytes) {
    buffer.memory.reset();
    buffer.bytes = 0;
    buffer.memory.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
    buffer.bytes = bytes;
  }
  data_ = buffer.memory.get();
}

HeldScratch::~HeldScratch() {
  Buffer& buffer = buffers[static_cast<std::size_t>(use_)];
  if (buffer.bytes <= kKeptBytes) return;
  buffer.memory.reset();
  buffer.bytes = 0;
}

}  // namespace monograph
