// Decodes columns [begin, end) of one row, for every format F, vocabulary V and output type T.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/runs.h"

namespace monograph {

// `count` elements from flat index `element`, all in one scale block.
template <class F, class V, class T>
[[gnu::always_inline]] inline void decode_run(const std::uint8_t* values, std::size_t element,
                                              std::size_t count, float scale, T* out) {
  constexpr std::size_t lanes = V::template kLanes<T>;
  if constexpr (F::kBlock != 0 && F::kBlock < lanes) {
    return decode_run<F, typename V::Narrow>(values, element, count, scale, out);
  } else {
    const std::size_t stop = element + count;
    // A row of odd length starts the next one in the middle of a byte.
    for (; element % F::kPerByte != 0 && element < stop; ++element)
      *out++ = F::template decode_one<T>(values, element, scale);
    const auto prepared = F::template prepare<V, T>(scale);
    for (; element + lanes <= stop; element += lanes, out += lanes)
      V::template store<T>(out, F::template decode<V, T>(prepared, values + element / F::kPerByte));
    for (; element < stop; ++element) *out++ = F::template decode_one<T>(values, element, scale);
  }
}

template <class F, class V, class T>
[[gnu::always_inline]] inline void decode_row(const PackedView& weight, std::size_t row,
                                              std::size_t begin, std::size_t end, T* out) {
  for_each_run<F>(
      weight, row, begin,
      end, [&](std::size_t element, std::size_t count, float scale) __attribute__((always_inline)) {
        decode_run<F, V>(weight.values, element, count, scale, out);
        out += count;
      });
}

}  // namespace monograph
