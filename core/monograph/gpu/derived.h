// What follows from the primitives, on every device. Each prims.h ends with it.
#pragma once

#include "monograph/gpu/prims.h"

namespace monograph::gpu {

// Two elements, the first in the low half.
template <class T>
MONOGRAPH_DEVICE std::uint32_t pack_two(float low, float high) {
  return static_cast<std::uint32_t>(round_to<T>(low).bits) |
         static_cast<std::uint32_t>(round_to<T>(high).bits) << 16;
}

template <class T>
MONOGRAPH_DEVICE T read_as(const void* p) {
  return read(static_cast<const T*>(p));
}
template <class T>
MONOGRAPH_DEVICE void write_as(void* p, T value) {
  write(static_cast<T*>(p), value);
}
MONOGRAPH_DEVICE bool is_aligned(const void* p, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}

}  // namespace monograph::gpu
