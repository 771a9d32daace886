// Runs the body of a kernel on the host: the threads of a block are fibers of the calling thread,
// blocks come one after the other. Every access goes through prims.h and is checked, in every
// build; faults are thrown by name. What it cannot see: operands of inline PTX, how the hardware
// rounds inside an mma, bank conflicts, and memory shared between blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "monograph/base/function_ref.h"
#include "monograph/gpu/host/fault.h"

namespace monograph::gpu::host {

// In which order the threads of a block, and the blocks, get their turns. A kernel without faults
// gives the same bits in all of them.
enum class Order : std::uint8_t { kAscending, kDescending, kScattered };
inline constexpr Order kOrders[] = {Order::kAscending, Order::kDescending, Order::kScattered};

// Global memory that the kernel was given.
struct Range {
  const void* begin;
  std::size_t bytes;
  bool writable;
};
template <class Vector>
Range input(const Vector& v) {
  return {v.data(), v.size() * sizeof(*v.data()), false};
}
template <class Vector>
Range output(Vector& v) {
  return {v.data(), v.size() * sizeof(*v.data()), true};
}

struct Grid {
  unsigned x = 1, y = 1;
  unsigned threads = 128;  // of a block, a multiple of 32
};

// Calls `body` once for each thread of each block. Throws KernelFault, or what the body throws.
void launch(const Grid& grid, std::span<const Range> memory, Order order, FunctionRef<void()> body);

}  // namespace monograph::gpu::host
