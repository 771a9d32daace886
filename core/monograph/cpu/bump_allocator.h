// Arrays one after the other in memory that is there, each at a multiple of 64 bytes; from a null
// base it measures.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monograph {

struct BumpAllocator {
  std::byte* next;

  template <class T>
  [[gnu::always_inline]] T* take(std::int64_t count) {
    T* const result = reinterpret_cast<T*>(next);
    const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    // In integers, because the base may be null.
    next = reinterpret_cast<std::byte*>(  // NOLINT(performance-no-int-to-ptr)
        reinterpret_cast<std::uintptr_t>(next) + bytes);
    return result;
  }
  [[gnu::always_inline]] std::size_t bytes() const { return reinterpret_cast<std::size_t>(next); }
};

}  // namespace monograph
