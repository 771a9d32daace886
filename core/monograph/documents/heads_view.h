// Tensors of tokens and heads, [tokens, heads, size], with strides.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monograph {

// Element (t, h, d) stands at data[t * token_stride + h * head_stride + d]; strides count elements.
// No alignment is assumed.
struct HeadsView {
  const void* data;
  std::ptrdiff_t token_stride, head_stride;
};
struct MutableHeadsView {
  void* data;
  std::ptrdiff_t token_stride, head_stride;
};

template <class T>
[[gnu::always_inline]] inline const T* row_of(const HeadsView& view, std::int64_t token,
                                              std::size_t head) {
  return static_cast<const T*>(view.data) + token * view.token_stride +
         static_cast<std::ptrdiff_t>(head) * view.head_stride;
}

template <class T>
[[gnu::always_inline]] inline T* row_of(const MutableHeadsView& view, std::int64_t token,
                                        std::size_t head) {
  return static_cast<T*>(view.data) + token * view.token_stride +
         static_cast<std::ptrdiff_t>(head) * view.head_stride;
}

// How much of a view a row is.
struct HeadsSize {
  std::size_t heads, size, element_bytes;
};

// Zero in the tokens [begin, end).
void clear_tokens(const MutableHeadsView& view, const HeadsSize& size, std::size_t begin,
                  std::size_t end);

}  // namespace monograph
