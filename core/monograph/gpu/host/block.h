// The block that is running: what the primitives of prims.h stand on when they run on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/base/function_ref.h"

namespace monograph::gpu::host {

inline constexpr unsigned kWarp = 32;

// A line of a kernel, as a default argument: that of the call. (clang 14 has no source_location.)
struct Line {
  const char* file;
  unsigned number;
  static constexpr Line here(const char* file = __builtin_FILE(),
                             unsigned number = __builtin_LINE()) {
    return {file, number};
  }
};

// Of the thread that asks. Only inside launch().
struct Place {
  unsigned thread, block_x, block_y;
};
Place place();

// Both check alignment, bounds and, in shared memory, who wrote last and when. Outside of launch()
// they check nothing: functions of a kernel can be called alone.
void check_read(const void* p, std::size_t bytes, std::size_t alignment);
void check_write(void* p, std::size_t bytes, std::size_t alignment);

std::byte* shared_object(std::size_t bytes);

void barrier(Line where);

// All 32 lanes bring an argument; the last one to arrive runs `all` on the 32.
void warp_together(void* mine, FunctionRef<void(void* const* lanes)> all, Line where);

// Asynchronous copies of the thread, in groups; nothing arrives before its group is waited for.
void copy_later(void* to, const void* from, std::size_t bytes, bool zeros);
void close_group();
void wait_for_groups(std::size_t but_last);

}  // namespace monograph::gpu::host
