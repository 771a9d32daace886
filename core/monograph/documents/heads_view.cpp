#include "monograph/documents/heads_view.h"

#include <cstring>

namespace monograph {

void clear_tokens(const MutableHeadsView& view, const HeadsSize& size, std::size_t begin,
                  std::size_t end) {
  const std::ptrdiff_t bytes = static_cast<std::ptrdiff_t>(size.element_bytes);
  for (std::size_t t = begin; t < end; ++t)
    for (std::size_t h = 0; h < size.heads; ++h) {
      const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(t) * view.token_stride +
                                static_cast<std::ptrdiff_t>(h) * view.head_stride;
      std::memset(static_cast<std::byte*>(view.data) + at * bytes, 0,
                  size.size * size.element_bytes);
    }
}

}  // namespace monograph
