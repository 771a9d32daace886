// A loop that is always unrolled, so that an array of vectors stays in registers: at -O2 compilers
// leave small loops as they are and the array in memory, at a tenth of the speed.
#pragma once

#include <cstddef>
#include <utility>

namespace monograph {

// body(i) for i = 0 ... kCount - 1, i an integral_constant.
template <std::size_t kCount, class Body>
[[gnu::always_inline]] inline void unrolled(Body&& body) {
  [&]<std::size_t... i>(std::index_sequence<i...>) __attribute__((always_inline)) {
    (body(std::integral_constant<std::size_t, i>{}), ...);
  }
  (std::make_index_sequence<kCount>{});
}

}  // namespace monograph
