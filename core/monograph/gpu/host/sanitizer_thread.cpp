#include <sanitizer/tsan_interface.h>

#include "monograph/gpu/host/sanitizer.h"

// Dynamic annotations, which no header of the sanitizer declares.
// NOLINTBEGIN(readability-identifier-naming)
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
// NOLINTEND(readability-identifier-naming)

namespace monograph::gpu::host {

void begin_host_stack(StackSeen& stack) { stack.thread = __tsan_get_current_fiber(); }
void begin_fiber_stack(StackSeen& stack, void* bottom, std::size_t size) {
  stack = {bottom, size, __tsan_create_fiber(0), nullptr};
}
void end_fiber_stack(StackSeen& stack) { __tsan_destroy_fiber(stack.thread); }
// A switch alone orders nothing: on a GPU it would not.
__attribute__((no_sanitize("thread"))) void leave_stack(StackSeen&, const StackSeen& to, bool) {
  __tsan_switch_to_fiber(to.thread, __tsan_switch_to_fiber_no_sync);
}
void enter_stack(StackSeen&, StackSeen&) {}
void release(void* at) { __tsan_release(at); }
void acquire(void* at) { __tsan_acquire(at); }
Unwatched::Unwatched() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
Unwatched::~Unwatched() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}

}  // namespace monograph::gpu::host
