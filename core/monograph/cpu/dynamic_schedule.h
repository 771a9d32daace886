// Work of uneven length on a pool.
#pragma once

#include <atomic>
#include <cstddef>

#include "monograph/cpu/parallel.h"

namespace monograph {

// body(index) for [0, count), each taken by the next free thread: ranges cut in advance would
// follow the number of units, not their length.
template <class Body>
void dynamic_schedule(std::size_t count, ParallelFor parallel_for, const Body& body) {
  std::atomic<std::size_t> next = 0;
  parallel_for(count, 1, [&](std::size_t, std::size_t) {
    for (std::size_t i = next++; i < count; i = next++) body(i);
  });
}

}  // namespace monograph
