#include "monograph/gpu/host/sanitizer.h"

namespace monograph::gpu::host {

void begin_host_stack(StackSeen&) {}
void begin_fiber_stack(StackSeen& stack, void* bottom, std::size_t size) {
  stack.bottom = bottom;
  stack.size = size;
}
void end_fiber_stack(StackSeen&) {}
void leave_stack(StackSeen&, const StackSeen&, bool) {}
void enter_stack(StackSeen&, StackSeen&) {}
void release(void*) {}
void acquire(void*) {}
Unwatched::Unwatched() {}
Unwatched::~Unwatched() {}

}  // namespace monograph::gpu::host
