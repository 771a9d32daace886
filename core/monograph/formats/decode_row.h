// Decodes columns [begin, end) of one row, for every format F, vocabulary V and output type T.
#pragma once

#include <cstddef>
#include <cstdint>

#include "monograph/formats/interleaved.h"
#include "monograph/formats/row_groups.h"
#include "monograph/formats/runs.h"

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

// Whether two blocks of a 4-bit format fill a vector, and V can look up in two tables at once.
template <class F, class V, class T>
inline constexpr bool kInPairs = [] {
  if constexpr (F::kBlock != 0 && F::kPerByte == 2 && 2 * F::kBlock == V::template kLanes<T>)
    return requires { V::template lookup_pair<T, F::kNibbles>; };
  return false;
}();

// As many pairs of blocks as lie whole in [element, last); returns the first element not decoded.
template <class F, class V, class T>
[[gnu::always_inline]] inline std::size_t decode_pairs(const PackedView& weight,
                                                       std::size_t element, std::size_t last,
                                                       T* out) {
  if (element % F::kBlock != 0) return element;
  for (; element + 2 * F::kBlock <= last; element += 2 * F::kBlock, out += 2 * F::kBlock) {
    const std::size_t block = element / F::kBlock;
    const auto first = F::template prepare<V, T>(F::block_scale(weight, block));
    const auto second = F::template prepare<V, T>(F::block_scale(weight, block + 1));
    V::template store<T>(
        out, V::template lookup_pair<T, F::kNibbles>(first, second, weight.values + element / 2));
  }
  return element;
}

template <class F, class V, class T>
[[gnu::always_inline]] inline void decode_row_of_runs(const PackedView& weight, std::size_t row,
                                                      std::size_t begin, std::size_t end, T* out) {
  if constexpr (kInPairs<F, V, T>) {
    const std::size_t first = weight.element(row, 0);
    const std::size_t done = decode_pairs<F, V>(weight, first + begin, first + end, out) - first;
    out += done - begin;
    begin = done;
  }
  for_each_run<F>(
      weight, row, begin,
      end, [&](std::size_t element, std::size_t count, float scale) __attribute__((always_inline)) {
        decode_run<F, V>(weight.values, element, count, scale, out);
        out += count;
      });
}

template <class F, class V, class T>
[[gnu::always_inline]] inline void decode_row(const PackedView& weight, std::size_t row,
                                              std::size_t begin, std::size_t end, T* out) {
  if constexpr (F::kShape == BlockShape::kGroup) {
    return decode_groups<F, V>(weight, row, begin, end, out);
  } else if constexpr (F::kShape == BlockShape::kInterleaved) {
    return decode_interleaved<F, V>(weight, row, begin, end, out);
  } else {
    decode_row_of_runs<F, V>(weight, row, begin, end, out);
  }
}

}  // namespace monograph
