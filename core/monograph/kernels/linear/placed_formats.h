// The decoder to places of each format that is decoded_by_rows().
#pragma once

#include <type_traits>

#include "monograph/kernels/linear/placed_groups.h"
#include "monograph/kernels/linear/placed_superblocks.h"

namespace monograph {

template <class F, class Order, bool kBf16>
constexpr PlacedRowsFn* placed_decoder() {
  if constexpr (F::kShape == BlockShape::kGroup)
    return placed_groups<F, Order, kBf16>;
  else
    return placed_blocks<F, Order, kBf16>;
}

template <class Order, bool kBf16, class... Fs>
PlacedRowsFn* find_placed(FormatList<Fs...>, Format format) {
  PlacedRowsFn* found = nullptr;
  ((format == Fs::kFormat ? void(found = placed_decoder<Fs, Order, kBf16>()) : void()), ...);
  return found;
}

// How rows of a weight with format F, for activations of type T, come to places: by the decoder of
// their own format if F is ByRows.
template <class F, class Order, class T>
[[gnu::always_inline]] inline PlacedRowsFn* placed_rows(const LinearWeight& weight) {
  if constexpr (std::is_same_v<F, ByRows>) {
    constexpr bool kBf16 = std::is_same_v<T, Bf16>;
    const Format format = weight.packed.format;
    if (in_list(RowFormats{}, format)) return find_placed<Order, kBf16>(RowFormats{}, format);
    return find_placed<Order, kBf16>(InterleavedFormats{}, format);
  } else {
    return placed_any<F, Order>;
  }
}

}  // namespace monograph
