// The test program's allocator, which fails on demand.
#pragma once

namespace monograph::files {

// Allocations with new on this thread until one throws bad_alloc; negative: none does.
extern thread_local long allocations_left;

}  // namespace monograph::files
