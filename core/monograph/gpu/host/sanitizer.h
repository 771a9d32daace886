// What a sanitizer has to be told of fibers. CMake compiles one of sanitizer_*.cpp.
#pragma once

#include <cstddef>

namespace monograph::gpu::host {

// A stack that code is run on: a fiber's, or that of the thread which called launch().
struct StackSeen {
  const void* bottom = nullptr;
  std::size_t size = 0;
  void* thread = nullptr;  // ThreadSanitizer's
  void* frames = nullptr;  // AddressSanitizer's, while another stack runs
};

// The stack that calls.
void begin_host_stack(StackSeen& stack);
void begin_fiber_stack(StackSeen& stack, void* bottom, std::size_t size);
void end_fiber_stack(StackSeen& stack);
// Around a switch: the first before it on the old stack, the second behind it on the new one, with
// `old` the stack that was left. A fiber that ends leaves for good.
void leave_stack(StackSeen& from, const StackSeen& to, bool for_good);
void enter_stack(StackSeen& stack, StackSeen& old);
// All that was written before release() is seen behind acquire() of the same address.
void release(void* at);
void acquire(void* at);

// The harness' own memory is shared by all fibers without locks: they run one at a time.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};

}  // namespace monograph::gpu::host
