#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

#include "monograph/gpu/host/sanitizer.h"

namespace monograph::gpu::host {

void begin_host_stack(StackSeen&) {}
void begin_fiber_stack(StackSeen& stack, void* bottom, std::size_t size) {
  // A fiber that was given up after a fault leaves its frames poisoned.
  __asan_unpoison_memory_region(bottom, size);
  stack = {bottom, size, nullptr, nullptr};
}
void end_fiber_stack(StackSeen&) {}
void leave_stack(StackSeen& from, const StackSeen& to, bool for_good) {
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from.frames, to.bottom, to.size);
}
// The host's stack is known only once it has been left.
void enter_stack(StackSeen& stack, StackSeen& old) {
  const void* bottom = nullptr;
  std::size_t size = 0;
  __sanitizer_finish_switch_fiber(stack.frames, &bottom, &size);
  if (old.bottom == nullptr) {
    old.bottom = bottom;
    old.size = size;
  }
}
void release(void*) {}
void acquire(void*) {}
Unwatched::Unwatched() {}
Unwatched::~Unwatched() {}

}  // namespace monograph::gpu::host
